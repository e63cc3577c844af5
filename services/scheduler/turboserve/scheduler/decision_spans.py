"""Spans of the scheduler's commands: what was decided, with the numbers, in the trace that caused it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from opentelemetry.context import Context, get_current
from opentelemetry.trace import Link, Span

from turboserve.contracts.sessions import Decision, SessionRecord
from turboserve.scheduler.messages import (
    AbandonMigration,
    BeginMigration,
    Command,
    CommitMigration,
    Event,
    MigrationRequested,
    Place,
    RecordDecision,
    Release,
)
from turboserve.telemetry import context_from, links_to, tracer, tracing
from turboserve.telemetry_names import (
    CHUNK_INDEX,
    DECISION,
    DECISION_NUMBERS,
    DECISION_REASON,
    EPOCH,
    SESSION,
    WORKER,
)

CONTINUED = frozenset({"place", "resume", "wait"})
"""Kinds of decisions that a user's request waits for. They belong to the trace of that request."""
_trace = tracer("scheduler")


@dataclass(frozen=True)
class Cause:
    """Where the span of a command belongs."""

    context: Context
    """Context of the span that is continued; without a span: the command begins a trace."""
    links: tuple[Link, ...] = ()


NO_CAUSE = Cause(Context())


def cause_of(command: Command, event: Event, row: SessionRecord | None) -> Cause:
    """Return what `command` continues. `event` made the core issue it; `row` is the session's, if known.

    Call this where `event` is processed, since the request of an operator is the current span there.
    """
    if not tracing() or row is None:
        return NO_CAUSE
    match command:
        case Place(decision=decision) | RecordDecision(decision=decision) if decision.kind in CONTINUED:
            return Cause(context_from(row.traceparent))
        case BeginMigration() if isinstance(event, MigrationRequested):
            return Cause(get_current(), tuple(links_to(row.traceparent)))
        case CommitMigration() | AbandonMigration():
            return Cause(context_from(row.migration_traceparent))
        case _:
            return Cause(Context(), tuple(links_to(row.traceparent)))


def span_of(command: Command, cause: Cause) -> AbstractContextManager[Span] | None:
    """Return the span of a command that changes or explains a session; None for the other commands."""
    match command:
        case Place() | BeginMigration() | RecordDecision() | Release():
            name, attributes = f"decide {command.decision.kind}", _attributes(command.decision)
        case CommitMigration():
            name = "decide commit"
            attributes = {
                SESSION: command.session,
                WORKER: command.worker,
                CHUNK_INDEX: command.next_chunk,
                **_numbers(command.numbers),
            }
        case AbandonMigration():
            name = "decide abandon"
            attributes = {SESSION: command.session, DECISION_REASON: command.reason}
        case _:
            return None
    return _trace.start_as_current_span(name, context=cause.context, links=cause.links, attributes=attributes)


def _attributes(decision: Decision) -> dict[str, str | float]:
    attributes: dict[str, str | float] = {
        SESSION: decision.session,
        DECISION: decision.kind,
        DECISION_REASON: decision.reason,
        EPOCH: decision.epoch,
        **_numbers(decision.numbers),
    }
    if decision.worker is not None:
        attributes[WORKER] = decision.worker
    return attributes


def _numbers(numbers: dict[str, float]) -> dict[str, str | float]:
    return {DECISION_NUMBERS + name: value for name, value in numbers.items()}

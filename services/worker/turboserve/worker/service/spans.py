"""Spans of a session at its worker: its admission, its chunks and their stages, and its migrations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Span, set_span_in_context

from turboserve.contracts.sessions import SessionRecord
from turboserve.recorded_span import RecordedSpan, UnsampledSpan
from turboserve.telemetry import context_from, links_to, samples_next, tracer
from turboserve.telemetry_names import (
    BATCH_SIZE,
    CHUNK_INDEX,
    CONTROL_SEQ,
    EPOCH,
    ERROR_TYPE,
    MIGRATION_ON_HOST,
    PERIODIC,
    SESSION,
)
from turboserve.worker.engine.interface import ChunkReady, ChunkTimings
from turboserve.worker.service.migration_commands import FetchState
from turboserve.worker.service.session_entry import Absent, DesiredState, SessionEntry

_trace = tracer("worker")


class AdmissionSpans:
    """The open spans of one worker, at most one per session."""

    def __init__(self) -> None:
        self._open: dict[str, Span] = {}

    def assigned(self, records: Iterable[SessionRecord], entries: Mapping[str, SessionEntry]) -> None:
        """Begin a span for each session that is to run here and has no slot yet."""
        for record in records:
            entry = entries.get(record.id)
            if entry is None or record.id in self._open or not isinstance(entry.state, Absent):
                continue
            if entry.wanted is DesiredState.RUN and record.traceparent is not None:
                self._open[record.id] = _trace.start_span(
                    "admit session",
                    context=context_from(record.traceparent),
                    attributes={SESSION: record.id, EPOCH: record.epoch},
                )
        for session in self._open.keys() - entries.keys():
            self._end(session, "left")

    def admitted(self, session: str, next_chunk: int) -> None:
        """The engine has the session's admission."""
        span = self._open.pop(session, None)
        if span is not None:
            span.set_attribute(CHUNK_INDEX, next_chunk)
            span.end()

    def _end(self, session: str, reason: str) -> None:
        span = self._open.pop(session)
        span.set_attribute(ERROR_TYPE, reason)
        span.end()


@dataclass(frozen=True)
class ChunkOrigin:
    """Trace contexts of what a chunk follows, as `traceparent`."""

    cause: str | None = None
    """The request that the chunk answers: an assignment, a prompt, a migration. None: the chunk follows its
    predecessor."""
    related: tuple[str, ...] = ()
    """Further requests that the chunk answers, and the session's assignment."""
    batched: Mapping[str, str | None] = field(default_factory=dict)
    """The sessions that were computed together with this one, with the traces of their assignments. Empty if
    the chunk is not sampled."""
    sampled: bool = True
    """Whether the chunk's spans are exported. If not, it has a span only if it fails."""


NO_ORIGIN = ChunkOrigin()


class RunTrace:
    """The trace contexts of one engine run. A worker that does not trace keeps none."""

    def __init__(self) -> None:
        self.assigned: str | None = None
        """Context of the session's assignment to this worker."""
        self._cause: str | None = None
        self._prompts: list[tuple[int, str]] = []

    def assign(self, traceparent: str | None) -> None:
        """The row names this context. If it is new, the next chunk answers it."""
        if traceparent is not None and traceparent != self.assigned:
            self.assigned = self._cause = traceparent

    def prompt(self, control_seq: int, traceparent: str | None) -> None:
        """The first chunk under this control answers the request with this context."""
        if traceparent is not None and (control_seq, traceparent) not in self._prompts:
            self._prompts.append((control_seq, traceparent))

    def origin(self, control_seq: int) -> ChunkOrigin:
        """Return the origin of the run's next chunk, which was generated under this control."""
        if self._cause is None and not self._prompts:
            answered = () if self.assigned is None else (self.assigned,)
            return ChunkOrigin(None, answered, sampled=samples_next(None))
        applied = [text for seq, text in self._prompts if seq <= control_seq]
        self._prompts = [prompt for prompt in self._prompts if prompt[0] > control_seq]
        causes = [text for text in (self._cause, *reversed(applied)) if text is not None]
        self._cause = None
        cause = causes[0] if causes else None
        related = causes[1:]
        if self.assigned is not None and self.assigned != cause:
            related.append(self.assigned)
        return ChunkOrigin(cause, tuple(related), sampled=samples_next(cause))


def chunk_span(
    ready: ChunkReady,
    origin: ChunkOrigin,
    packaged_s: float,
    now_s: float,
    nanoseconds: Callable[[float], int],
) -> Span:
    """Return the chunk's span, which the caller ends. It has the spans of its stages.

    The chunk was packaged from `packaged_s` to `now_s`, on the engine's clock. `nanoseconds` converts such a
    time to Unix time.
    """
    # The span may outlive the frames of the chunk, and does not keep them.
    attributes: dict[str, str | int] = {
        SESSION: ready.session,
        CHUNK_INDEX: ready.index,
        CONTROL_SEQ: ready.control_seq,
    }
    begin = partial(_chunk_span, attributes, ready.timings, origin, packaged_s, now_s, nanoseconds)
    return begin() if origin.sampled else UnsampledSpan(begin)


def _chunk_span(
    attributes: dict[str, str | int],
    timings: ChunkTimings,
    origin: ChunkOrigin,
    packaged_s: float,
    now_s: float,
    nanoseconds: Callable[[float], int],
) -> Span:
    began_s = min([timings.started_s, *(step.began_s for step in timings.steps)])
    # One reading of the clocks for all times of the chunk.
    zero_ns = nanoseconds(0.0)
    if origin.cause is None:
        attributes[PERIODIC] = True
    span = _trace.start_span(
        "generate chunk",
        context=context_from(origin.cause),
        links=links_to(*origin.related),
        start_time=zero_ns + round(began_s * 1e9),
        attributes=attributes,
        sampled=origin.sampled,
    )
    if isinstance(span, RecordedSpan) and span.get_span_context().trace_flags.sampled:
        span.stages = partial(_stages, span, timings, origin.batched, packaged_s, now_s, zero_ns)
    return span


def _stages(
    span: RecordedSpan,
    timings: ChunkTimings,
    batched: Mapping[str, str | None],
    packaged_s: float,
    now_s: float,
    zero_ns: int,
) -> list[ReadableSpan]:
    def unix_ns(at_s: float) -> int:
        return zero_ns + round(at_s * 1e9)

    found = []
    batch: frozenset[str] = frozenset()
    for step in timings.steps:
        # A batch of the same sessions as the step before has the same links, which are not repeated: to
        # encode them would take longer than the rest of the span.
        before, batch = batch, frozenset(step.sessions)
        others = step.sessions if batch != before else ()
        found.append(
            span.stage(
                step.stage,
                unix_ns(step.began_s),
                unix_ns(step.ended_s),
                {BATCH_SIZE: len(step.sessions)},
                links_to(*(batched.get(name) for name in others)),
            )
        )
    decoding_s = timings.ready_s - timings.decode_s
    found.append(span.stage("decode", unix_ns(decoding_s), unix_ns(timings.ready_s)))
    found.append(span.stage("package", unix_ns(packaged_s), unix_ns(now_s)))
    return found


def fetch_span(command: FetchState) -> AbstractContextManager[Span]:
    """Return the span of the target's copy, within which each round has a span."""
    return _trace.start_as_current_span(
        "fetch state",
        context=context_from(command.traceparent),
        attributes={SESSION: command.session, MIGRATION_ON_HOST: command.on_host},
    )


class SendSpans:
    """The spans of the sessions that migrate from this worker, one for each transfer attempt."""

    def __init__(self) -> None:
        self._open: dict[str, Span] = {}

    def began(self, session: str, traceparent: str | None) -> None:
        """A transfer attempt begins."""
        self.ended(session)
        if traceparent is not None:
            self._open[session] = _trace.start_span(
                "send state", context=context_from(traceparent), attributes={SESSION: session}
            )

    def step(self, name: str, session: str) -> AbstractContextManager[Span]:
        """Return the span of one step of the session's attempt, which also shows how the step failed."""
        span = self._open.get(session)
        if span is None:
            return _trace.child(name)
        return _trace.start_as_current_span(
            name, context=set_span_in_context(span), attributes={SESSION: session}
        )

    def ended(self, session: str) -> None:
        """The transfer attempt has ended, with or without the whole state."""
        span = self._open.pop(session, None)
        if span is not None:
            span.end()

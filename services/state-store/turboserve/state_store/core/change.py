"""A change of a session's row: enforces the transition table, raises the version, names the events.

Its compare-and-set is on the row's version, and on the leader's term where only a leader may ask.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from turboserve.contracts.errors import ConflictError, StaleTermError, TransitionError
from turboserve.contracts.events import SessionEvent
from turboserve.contracts.leading import LeaderRecord
from turboserve.contracts.sessions import TRANSITIONS, Decision, Phase, SessionRecord


@dataclass(frozen=True)
class Change:
    """What a change writes: the new row, its events, and the decision that caused it."""

    record: SessionRecord
    events: tuple[SessionEvent, ...] = ()
    decision: Decision | None = None


def traced(change: Change, field: str, traceparent: str | None) -> Change:
    """Return the change with `traceparent` in this field of the row, as its events carry it, too."""
    return with_field(change, field, traceparent)


def with_field(change: Change, field: str, value: object) -> Change:
    """Return the change with `value` in this field of the row, as its events carry it, too."""
    if getattr(change.record, field) == value:
        return change
    record = change.record.model_copy(update={field: value})
    events = tuple(event.model_copy(update={"record": record}) for event in change.events)
    return Change(record, events, change.decision)


def event_id(*parts: object) -> str:
    """Return the id of the event that `parts` name. It is always the same, so that no event has two ids."""
    return "ev_" + hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:32]


def change_id(record: SessionRecord, kind: str) -> str:
    """Return the id of the event of the change that made the version of `record`."""
    return event_id(record.id, record.version, kind)


def step(record: SessionRecord, now: float, *, to: Phase | None = None, **updates: Any) -> SessionRecord:
    """Return the row one version and one event later, in phase `to` (None: the same, without a transition).

    Raises TransitionError if the table does not allow the transition. A row that has ended allows none.
    """
    if to is None:
        if record.phase.ended:
            raise not_allowed(record, "changed")
    elif to not in TRANSITIONS[record.phase]:
        raise not_allowed(record, to.value)
    return record.model_copy(
        update={
            "version": record.version + 1,
            "event_sequence": record.event_sequence + 1,
            "updated_at": now,
            "phase": to or record.phase,
            **updates,
        }
    )


def assign_owner(record: SessionRecord, worker: str | None) -> dict[str, Any]:
    """Return the fields of a change of owner: the next epoch, whose fence is not in the log yet."""
    return {"epoch": record.epoch + 1, "worker": worker, "own_revision": None}


NO_MIGRATION: dict[str, None] = {"target": None, "migration": None, "migration_traceparent": None}
"""The fields of a session without a migration."""


def not_allowed(record: SessionRecord, wish: str) -> TransitionError:
    """Return the error that the session's phase does not allow `wish`. Its text names both."""
    phase = record.phase.value
    if record.phase is Phase.SUSPENDED:
        phase = f"{phase} ({record.activity.value})"
    return TransitionError(
        f"session {record.id} is {phase} and cannot be {wish}", field="phase", limit=record.phase.value
    )


def expect_version(record: SessionRecord, expected: int) -> None:
    """Compare the version, for compare-and-set. Raises ConflictError: the caller should read again."""
    if record.version != expected:
        raise ConflictError(
            f"session {record.id} is at version {record.version}, not {expected}",
            field="expected_version",
            limit=record.version,
        )


def expect_term(record: LeaderRecord, term: int) -> None:
    """Compare the term, for a change that only a leader makes. Raises StaleTermError: it stands down."""
    if record.term != term:
        raise StaleTermError(
            f"term {term} of the {record.name} is over: "
            f"{record.holder or 'no process'} leads in term {record.term}",
            field="term",
            limit=record.term,
        )

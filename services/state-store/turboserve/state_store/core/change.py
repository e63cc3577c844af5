"""One change of a session's row: the transition table enforced, the version raised, the events named."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from turboserve.contracts.errors import ConflictError, TransitionError
from turboserve.contracts.events import SessionEvent
from turboserve.contracts.sessions import TRANSITIONS, Decision, Phase, SessionRecord


@dataclass(frozen=True)
class Change:
    """What is to be written: the row as it shall be, the events of it, and the decision behind it."""

    record: SessionRecord
    events: tuple[SessionEvent, ...] = ()
    decision: Decision | None = None


def event_id(*parts: object) -> str:
    """The id of the event that `parts` name, the same each time: nothing is told twice under two ids."""
    return "ev_" + hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:32]


def change_id(record: SessionRecord, kind: str) -> str:
    """The id of the event that tells of the change that made `record`'s version."""
    return event_id(record.id, record.version, kind)


def step(record: SessionRecord, now: float, *, to: Phase | None = None, **updates: Any) -> SessionRecord:
    """The row one version later, in phase `to` (None: the same, without a transition).

    Raises TransitionError if the table does not allow it; a row that has ended allows nothing.
    """
    if to is None:
        if record.phase.ended:
            raise not_allowed(record, "changed")
    elif to not in TRANSITIONS[record.phase]:
        raise not_allowed(record, to.value)
    return record.model_copy(
        update={"version": record.version + 1, "updated_at": now, "phase": to or record.phase, **updates}
    )


def assign_owner(record: SessionRecord, worker: str | None) -> dict[str, Any]:
    """The fields of a change of owner: the next epoch, whose fence is not in the log yet."""
    return {"epoch": record.epoch + 1, "worker": worker, "own_revision": None}


NO_MOVE: dict[str, None] = {"target": None, "move": None}
"""The fields of a session that is not on its way anywhere."""


def not_allowed(record: SessionRecord, wish: str) -> TransitionError:
    """The session's phase does not allow `wish`; the text names both."""
    phase = record.phase.value
    if record.phase is Phase.SUSPENDED:
        phase = f"{phase} ({record.activity.value})"
    return TransitionError(
        f"session {record.id} is {phase} and cannot be {wish}", field="phase", limit=record.phase.value
    )


def expect_version(record: SessionRecord, expected: int) -> None:
    """The compare of compare-and-set. Raises ConflictError, to be answered by reading again."""
    if record.version != expected:
        raise ConflictError(
            f"session {record.id} is at version {record.version}, not {expected}",
            field="expected_version",
            limit=record.version,
        )

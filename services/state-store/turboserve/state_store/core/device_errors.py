"""Fails sessions whose input breaks a kernel: each would end one worker after another (a poison message).

A device error does not identify the session that caused it. So it counts for every session of the failing
step. A session that then makes chunks on another worker was not the cause, and its count starts again.
"""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.contracts.requests import FailSession
from turboserve.contracts.sessions import Decision, SessionRecord
from turboserve.state_store.core.change import Change
from turboserve.state_store.core.sessions import fail
from turboserve.wording import counted


@dataclass(frozen=True)
class PoisonLimits:
    """Limits from which on a session is failed."""

    workers: int
    """Number of workers in a row that died of a device error; 0: never fail the session."""
    window_s: float
    """Two device errors further apart than this are not related."""
    chunks: int
    """A session that has made this many chunks between two device errors did not cause the first."""


def count(
    record: SessionRecord, worker: str, among: int, limits: PoisonLimits, now: float, in_log: int = 0
) -> tuple[Change, Decision] | None:
    """Return the row after `worker` died of a device error in a step for this session, and the decision.

    `among`: number of sessions in that step. `in_log`: index of the next chunk by the log; the row may lag
    behind it. At the limit, the change fails the session. Below it, the change counts the error without
    raising the version. None: `worker` does not own the session, or it has ended.
    """
    if record.worker != worker or record.phase.ended:
        return None
    next_chunk = max(record.next_chunk, in_log)
    since_s = None if record.device_error_at is None else now - record.device_error_at
    same = (
        record.device_errors > 0
        and since_s is not None
        and since_s <= limits.window_s
        and next_chunk - record.device_error_chunk < limits.chunks
    )
    errors = 1 + (record.device_errors if same else 0)
    after = record.model_copy(
        update={
            "device_errors": errors,
            "device_error_at": now,
            "device_error_chunk": next_chunk,
        }
    )
    decision = Decision(
        session=record.id,
        epoch=record.epoch,
        worker=worker,
        kind="device_error",
        reason=f"{worker} failed with a device error in a step of this session",
        numbers={"device_errors": errors, "limit": limits.workers, "sessions_in_step": among},
        at=now,
    )
    if not limits.workers or errors < limits.workers:
        return Change(after), decision
    workers = counted(errors, "worker", "workers in a row")
    reason = f"poisoned: {workers} failed with a device error in a step of this session"
    request = FailSession(session=record.id, epoch=record.epoch, worker=worker, reason=reason)
    failed = fail(after, request, now)
    assert failed is not None
    return failed, decision

"""Sessions whose input breaks a kernel: each would end one worker after another (a poison message).

A device error does not say whose input it was. Every session of the failing step is counted; one that goes on
elsewhere was not it, and is counted anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.contracts.requests import FailSession
from turboserve.contracts.sessions import Decision, SessionRecord
from turboserve.state_store.core.change import Change
from turboserve.state_store.core.sessions import fail


@dataclass(frozen=True)
class PoisonLimits:
    """When a session is failed."""

    workers: int
    """That died in a row; 0: never."""
    window_s: float
    """Two deaths further apart than this have nothing to do with each other."""
    chunks: int
    """A session that has made so many between two deaths did not cause the first."""


def count(
    record: SessionRecord, worker: str, among: int, limits: PoisonLimits, now: float
) -> tuple[Change, Decision] | None:
    """The row after `worker` died of a device error in a step for this session, and what is noted of it.

    `among`: sessions of that step. The change is a failure if that was one worker too many; else it counts
    without raising the version. None: the session was not this worker's, or has ended.
    """
    if record.worker != worker or record.phase.ended:
        return None
    since_s = None if record.device_error_at is None else now - record.device_error_at
    same = (
        record.device_errors > 0
        and since_s is not None
        and since_s <= limits.window_s
        and record.next_chunk - record.device_error_chunk < limits.chunks
    )
    errors = 1 + (record.device_errors if same else 0)
    counted = record.model_copy(
        update={
            "device_errors": errors,
            "device_error_at": now,
            "device_error_chunk": record.next_chunk,
        }
    )
    decision = Decision(
        session=record.id,
        epoch=record.epoch,
        worker=worker,
        kind="device_error",
        reason=f"{worker} died of a device error in a step for it",
        numbers={"device_errors": errors, "limit": limits.workers, "sessions_in_step": among},
        at=now,
    )
    if not limits.workers or errors < limits.workers:
        return Change(counted), decision
    reason = f"poisoned: {errors} workers in a row died of a device error in a step for it"
    request = FailSession(session=record.id, epoch=record.epoch, worker=worker, reason=reason)
    failed = fail(counted, request, now)
    assert failed is not None
    return failed, decision

"""The pool as operators see it."""

from __future__ import annotations

from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.slots import STARTING, Slot
from turboserve.contracts.pool import PoolAction, PoolSlot, PoolStatus, SlotPhase
from turboserve.contracts.workers import WorkerPhase, WorkerRecord

_PHASES = {
    WorkerPhase.STARTING: SlotPhase.LOADING,
    WorkerPhase.READY: SlotPhase.READY,
    WorkerPhase.DRAINING: SlotPhase.DRAINING,
    WorkerPhase.GONE: SlotPhase.VACANT,
}


def pool_status(pool: Pool, provider: str, managed: bool, now: float, wall: float) -> PoolStatus:
    """`now` is the core's monotonic time, `wall` the same instant for people.

    Workers that this pool did not start are listed after its own, and counted only if it has none by design.
    """
    slots = [_slot(slot, now, wall) for slot in sorted(pool.slots.values(), key=lambda s: (s.index, s.name))]
    ours = {slot.worker for slot in slots}
    others = [_row(row) for row in sorted(pool.rows.values(), key=lambda r: r.id) if row.id not in ours]
    phases = [slot.phase for slot in (slots if managed else others)]
    return PoolStatus(
        provider=provider,
        pool=pool.name,
        target=pool.target if managed else None,
        ready=phases.count(SlotPhase.READY),
        starting=sum(phase in STARTING for phase in phases),
        draining=phases.count(SlotPhase.DRAINING),
        slots=(*slots, *others),
        actions=tuple(
            PoolAction(
                at=wall - (now - action.at),
                slot=action.slot,
                worker=action.worker,
                action=action.action,
                reason=action.reason,
            )
            for action in pool.actions
        ),
        reason=_trouble(pool) if managed else None,
        at=wall,
    )


def _slot(slot: Slot, now: float, wall: float) -> PoolSlot:
    return PoolSlot(
        slot=slot.name[:64],
        phase=slot.phase,
        wanted=slot.wanted,
        worker=slot.worker,
        pid=slot.pid,
        since=max(wall - (now - slot.since), 0.0),
        sessions=slot.sessions,
        suspended=slot.suspended,
        failures=slot.failures,
        retry_in_s=max(slot.retry_at - now, 0.0) if slot.phase is SlotPhase.BACKING_OFF else None,
        reason=slot.reason,
    )


def _row(row: WorkerRecord) -> PoolSlot:
    return PoolSlot(
        slot=row.pool_slot or row.id,
        phase=_PHASES[row.phase],
        worker=row.id,
        pid=row.pid,
        since=row.started_at,
        sessions=row.sessions,
        suspended=row.suspended,
        reason="started by someone else",
    )


def _trouble(pool: Pool) -> str | None:
    if not pool.adopted:
        return "the provider has not said yet what is running"
    wanted = [slot for slot in pool.slots.values() if slot.wanted]
    missing = [slot for slot in wanted if slot.phase is not SlotPhase.READY]
    if not missing:
        silent = pool.store_doubt
        return None if silent is None else f"the state store does not say which workers are there: {silent}"
    worst = max(missing, key=lambda slot: (slot.failures, -slot.index))
    return f"{len(missing)} of {len(wanted)} workers are not ready; {worst.name}: {worst.reason}"

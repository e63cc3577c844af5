"""Reads a worker's capacity and its used slots for one session."""

from __future__ import annotations

from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import WorkerRecord
from turboserve.state_store.core.workers import Slots
from turboserve.state_store.ports.database import UnitOfWork


async def slots_of(db: UnitOfWork, worker: WorkerRecord, session: SessionRecord, capacity: int) -> Slots:
    """Return the worker's slots without this session. The caller has locked the worker's row.

    `capacity`: slots of a worker that serves one class.
    """
    if worker.classes is not None:
        counts = await db.admission.slots_by_class(worker.id, besides=session.id)
        return Slots.of_class(worker, session.model, counts)
    used = await db.admission.slots_used(worker.id, besides=session.id)
    return Slots(worker.model, worker.phase, capacity, used, worker.weights_digest)

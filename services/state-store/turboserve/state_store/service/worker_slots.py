"""What a placement and a migration need of a worker: its locked row, its capacity and its used slots."""

from __future__ import annotations

from turboserve.contracts.requests import BeginMigration, CommitMigration, PlaceSession, SessionRef
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import WorkerRecord
from turboserve.state_store.core.change import expect_term
from turboserve.state_store.core.workers import Slots
from turboserve.state_store.ports.database import UnitOfWork
from turboserve.state_store.ports.records import SessionRow
from turboserve.state_store.service.transactions import SCHEDULER, visible


async def lock_placement(
    db: UnitOfWork, request: PlaceSession | BeginMigration | CommitMigration, worker: str
) -> tuple[WorkerRecord | None, SessionRow]:
    """Hold the scheduler's term, lock the worker's row and then the session's, and return both rows.

    The worker's row comes first: requests that place on the worker or declare it gone wait for it. Call this
    before any other row is locked. Raises StaleTermError and SessionNotFoundError.
    """
    found = await db.placements.lock(SCHEDULER, worker, request.session)
    expect_term(found.leader, request.term)
    row = found.session
    visible(None if row is None else row.record, SessionRef(session=request.session))
    assert row is not None
    return found.worker, row


async def slots_of(db: UnitOfWork, worker: WorkerRecord, session: SessionRecord, capacity: int) -> Slots:
    """Return the worker's slots without this session. The caller has locked the worker's row.

    The count is a statement of its own: it sees all placements that were committed before the lock was free.
    `capacity`: slots of a worker that serves one class.
    """
    if worker.classes is not None:
        counts = await db.admission.slots_by_class(worker.id, besides=session.id)
        return Slots.of_class(worker, session.model, counts)
    used = await db.admission.slots_used(worker.id, besides=session.id)
    return Slots(worker.model, worker.phase, capacity, used, worker.weights_digest)

"""Counts the room of workers that serve several classes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection

from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.simulation.runtime.rows.session import Session
from turboserve.state_store.core.class_room import SharedRoom, SharedWorker, class_capacity


def declaring(db: Session, model: str) -> list[WorkerRecord]:
    """Return the workers that have the class among several."""
    found = [entry.record for _, entry in db.find(db.tables.workers, "several", True)]
    return [record for record in found if model in _served(record)]


def shared_room(
    db: Session,
    model: str,
    renewed_after: float,
    takes: Collection[WorkerPhase],
    waits: Callable[[SessionRecord], bool],
) -> SharedRoom:
    """As the function of this name over Postgres."""
    workers = [entry.record for _, entry in db.all(db.tables.workers)]
    live = {
        worker.id: worker
        for worker in workers
        if worker.phase is not WorkerPhase.GONE and worker.renewed_at > renewed_after
    }
    taking = {worker.id for worker in live.values() if worker.phase in takes}
    held: defaultdict[str, Counter[str]] = defaultdict(Counter)
    waiting: Counter[str] = Counter()
    for _, entry in db.all(db.tables.sessions):
        record = entry.record
        holds = record.phase.holds_slot
        if entry.ended_at is not None or not (holds or waits(record)):
            continue
        here = {record.worker, record.target} & taking if holds else set()
        for name in here:
            held[str(name)][record.model] += 1
        if not here:
            waiting[record.model] += 1
    shared = [worker for worker in live.values() if worker.phase in takes and model in _served(worker)]
    serving = [SharedWorker(_served(worker), held[worker.id]) for worker in shared]
    largest: Counter[str] = Counter()
    first: set[str] = set()
    for worker in declaring(db, model):
        runs = [other.classes for other in live.values() if other.model == worker.model]
        if runs and not any(classes is not None for classes in runs):
            continue
        first.add(worker.model)
        largest |= Counter(_served(worker))
    ready = [worker for worker in live.values() if worker.phase is WorkerPhase.READY]
    coming = _coming(db, first - {model}, ready, renewed_after)
    return SharedRoom(class_capacity(model, serving, waiting, largest), coming, largest[model])


def _coming(db: Session, first: set[str], ready: list[WorkerRecord], renewed_after: float) -> int:
    if not first:
        return 0
    pools = [pool for _, pool in db.all(db.tables.pools)]
    maximum = sum(pool.maximum for pool in pools if pool.model in first and pool.reported_at > renewed_after)
    return max(maximum - sum(worker.model in first for worker in ready), 0)


def _served(worker: WorkerRecord) -> dict[str, int]:
    return {one.model: one.capacity for one in worker.classes or ()}

"""Rows of workers."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from turboserve.contracts.sessions import Phase
from turboserve.contracts.worker_offers import ServedClass
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.simulation.runtime.rows.locks import LockMode
from turboserve.simulation.runtime.rows.session import Session
from turboserve.simulation.runtime.rows.tables import WorkerEntry
from turboserve.state_store.ports.records import GONE_LISTED, WORKER_COUNTED

_NOTHING = dict.fromkeys(WORKER_COUNTED, 0)


def _stored(record: WorkerRecord) -> WorkerRecord:
    """Return the record without the values that no column keeps."""
    if record.sessions or record.suspended or record.incoming:
        return record.model_copy(update=_NOTHING)
    return record


class MemoryWorkers:
    """`WorkerRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db, self._rows = session, session.tables.workers

    async def get(self, worker: str, *, lock: bool = False) -> WorkerRecord | None:
        def run() -> WorkerRecord | None:
            if lock:
                entry = self._db.lock(self._rows, worker, LockMode.UPDATE)
            else:
                entry = self._db.get(self._rows, worker)
            return None if entry is None else entry.record

        return await self._db.execute(run)

    async def lock_free(self, workers: Collection[str]) -> dict[str, WorkerRecord]:
        def run() -> dict[str, WorkerRecord]:
            found = {}
            for worker in dict.fromkeys(workers):
                if self._db.get(self._rows, worker) is None or not self._db.take_free(
                    (self._rows.name, worker)
                ):
                    continue
                entry = self._db.get(self._rows, worker)
                if entry is not None:
                    found[worker] = entry.record
            return found

        return await self._db.execute(run)

    async def insert(self, record: WorkerRecord) -> bool:
        entry = WorkerEntry(_stored(record))
        return await self._db.execute(lambda: self._db.insert_if_absent(self._rows, record.id, entry))

    async def write(self, record: WorkerRecord, *, gone_at: float | None = None) -> None:
        entry = WorkerEntry(_stored(record), gone_at)

        def run() -> None:
            if self._db.lock(self._rows, record.id, LockMode.NO_KEY_UPDATE) is not None:
                self._db.update(self._rows, record.id, entry)

        await self._db.execute(run)

    async def write_all(self, records: Sequence[WorkerRecord]) -> None:
        def run() -> None:
            for record in records:
                if self._db.lock(self._rows, record.id, LockMode.NO_KEY_UPDATE) is not None:
                    self._db.update(self._rows, record.id, WorkerEntry(_stored(record), None))

        await self._db.execute(run)

    async def write_renewed_at(self, times: Mapping[str, float]) -> None:
        def run() -> None:
            for worker, at in times.items():
                entry = self._db.lock(self._rows, worker, LockMode.NO_KEY_UPDATE)
                if entry is not None:
                    record = entry.record.model_copy(update={"renewed_at": at})
                    self._db.update(self._rows, worker, WorkerEntry(record, entry.gone_at))

        await self._db.execute(run)

    async def page(self, *, include_gone: bool) -> list[WorkerRecord]:
        def run() -> list[WorkerRecord]:
            entries = [entry for _, entry in self._db.all(self._rows)]
            listed = [entry for entry in entries if entry.record.phase is not WorkerPhase.GONE]
            if include_gone:
                gone = [entry for entry in entries if entry.record.phase is WorkerPhase.GONE]
                listed += heapq.nlargest(GONE_LISTED, gone, key=_gone_at)
            records = sorted(
                (entry.record for entry in listed), key=lambda record: (record.started_at, record.id)
            )
            return [self._counted(record) for record in records]

        return await self._db.execute(run)

    def _counted(self, record: WorkerRecord) -> WorkerRecord:
        sessions = self._db.tables.sessions
        phases = [entry.record.phase for _, entry in self._db.find(sessions, "worker", record.id)]
        update = {
            "sessions": sum(phase.holds_slot for phase in phases),
            "suspended": sum(phase is Phase.SUSPENDED for phase in phases),
            "incoming": len(self._db.find(sessions, "target", record.id)),
        }
        if record.classes is not None:
            record = record.model_copy(update={"classes": self._with_sessions(record.id, record.classes)})
        return record.model_copy(update=update) if any(update.values()) else record

    def _with_sessions(self, worker: str, classes: tuple[ServedClass, ...]) -> tuple[ServedClass, ...]:
        found = [entry for _, entry in self._db.find(self._db.tables.sessions, "worker", worker)]
        counts = Counter(entry.record.model for entry in found if entry.record.phase.holds_slot)
        return tuple(one.model_copy(update={"sessions": counts[one.model]}) for one in classes)

    async def delete_gone(self, gone_before: float) -> int:
        sessions = self._db.tables.sessions

        def run() -> int:
            due = [
                worker
                for worker, entry in self._db.all(self._rows)
                if entry.gone_at is not None
                and entry.gone_at < gone_before
                and not self._db.find(sessions, "worker", worker)
            ]
            return sum(self._db.delete(self._rows, worker) for worker in due)

        return await self._db.execute(run)


def _gone_at(entry: WorkerEntry) -> float:
    # The order of `order by gone_at desc`, which puts nulls first.
    return math.inf if entry.gone_at is None else entry.gone_at

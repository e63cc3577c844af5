"""Counts for admission: capacity and demand."""

from __future__ import annotations

from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.contracts.workers import WorkerPhase
from turboserve.simulation.runtime.rows.session import Session
from turboserve.state_store.core.tenants import TenantUse
from turboserve.state_store.core.workers import ModelCapacity
from turboserve.state_store.ports.records import AdmissionCounts

_LOCK = ("advisory", "admission")


def _demands(record: SessionRecord) -> bool:
    if record.phase is Phase.SUSPENDED:
        return record.activity is Activity.WATCHING
    return record.phase is Phase.REQUESTED or record.phase.holds_slot


class MemoryAdmission:
    """`AdmissionRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db = session

    async def lock(self) -> None:
        await self._db.execute(lambda: self._db.take(_LOCK))

    async def census(
        self, session: str, model: str, tenant: str, *, renewed_after: float, known_after: float
    ) -> AdmissionCounts:
        db, tables = self._db, self._db.tables

        def run() -> AdmissionCounts:
            workers = [entry.record for _, entry in db.find(tables.workers, "model", model)]
            takes = [
                worker
                for worker in workers
                if worker.phase in (WorkerPhase.STARTING, WorkerPhase.READY)
                and worker.renewed_at > renewed_after
            ]
            pools = [
                pool for _, pool in db.find(tables.pools, "model", model) if pool.reported_at > renewed_after
            ]
            ready = sum(worker.phase is WorkerPhase.READY for worker in takes)
            coming = max(sum(pool.maximum for pool in pools) - ready, 0)
            largest = max(1, max((worker.capacity for worker in workers), default=1))
            places = sum(worker.capacity for worker in takes) + coming * largest
            known = any(worker.renewed_at > known_after for worker in workers)
            known = known or any(pool.maximum > 0 for pool in pools)
            demand = sum(_demands(entry.record) for _, entry in db.find(tables.sessions, "live", model))
            if tables.sessions in db.writes:
                live = sum(entry.ended_at is None for _, entry in db.all(tables.sessions))
            else:
                live = sum(len(keys) for keys in tables.sessions.values("live").values())
            taken = db.get(tables.sessions, session) is not None
            return AdmissionCounts(
                taken, live, ModelCapacity(model, known, places, demand), self._use(tenant, model)
            )

        return await db.execute(run)

    def _use(self, tenant: str, model: str) -> TenantUse:
        db, tables = self._db, self._db.tables
        records = [entry.record for _, entry in db.find(tables.sessions, "tenant", tenant)]
        wanting = [record for record in records if _demands(record)]
        known = db.get(tables.tenants, tenant) is not None
        rows = len(tables.tenants.rows)
        if tables.tenants in db.writes:
            rows = len(db.all(tables.tenants))
        return TenantUse(
            live=len(records),
            suspended=sum(
                record.phase is Phase.SUSPENDED and record.activity is not Activity.WATCHING
                for record in records
            ),
            slots=len(wanting),
            model_slots=sum(record.model == model for record in wanting),
            known=known,
            others=rows > known,
        )

    async def slots_used(self, worker: str, *, besides: str) -> int:
        db, sessions = self._db, self._db.tables.sessions

        def run() -> int:
            found = dict(db.find(sessions, "worker", worker)) | dict(db.find(sessions, "target", worker))
            return sum(
                entry.ended_at is None and entry.record.phase.holds_slot and session != besides
                for session, entry in found.items()
            )

        return await db.execute(run)

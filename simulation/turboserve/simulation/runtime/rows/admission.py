"""Counts for admission: capacity and demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.contracts.workers import WorkerPhase
from turboserve.simulation.runtime.rows.session import Session
from turboserve.simulation.runtime.rows.shared_workers import declaring, shared_room
from turboserve.simulation.runtime.rows.tables import PoolEntry, SessionEntry
from turboserve.state_store.core.forecast import Outlook
from turboserve.state_store.core.session_spans import ENDED_LIMIT, LIVE_LIMIT, SessionTimes
from turboserve.state_store.core.tenants import TenantUse
from turboserve.state_store.core.workers import ModelCapacity
from turboserve.state_store.ports.records import AdmissionCounts

ADMISSION_LOCK = ("advisory", "admission")
_TAKES = (WorkerPhase.STARTING, WorkerPhase.READY)


def waits(record: SessionRecord) -> bool:
    """Whether the session waits for a slot."""
    if record.phase is Phase.SUSPENDED:
        return record.activity is Activity.WATCHING
    return record.phase is Phase.REQUESTED


def takes_slot(record: SessionRecord) -> bool:
    """Whether the session holds a slot or waits for one."""
    return record.phase.holds_slot or waits(record)


def _left(entry: SessionEntry, since: float) -> bool:
    """Whether the session has freed its slot after `since`."""
    record = entry.record
    if entry.ended_at is not None:
        return entry.ended_at > since and entry.purged_at is None
    idle = record.phase is Phase.SUSPENDED and record.activity is not Activity.WATCHING
    return idle and entry.suspended_at is not None and entry.suspended_at > since


def _decode_sessions(pools: Iterable[PoolEntry]) -> int | None:
    """Sessions that the decode workers of pools carry. None: no decode workers limit them."""
    return max((pool.decode_sessions for pool in pools if pool.decode_sessions is not None), default=None)


class MemoryAdmission:
    """`AdmissionRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db = session

    async def census(
        self,
        session: str,
        model: str,
        tenant: str,
        *,
        renewed_after: float,
        known_after: float,
        locks_tenant: bool = False,
    ) -> AdmissionCounts:
        db, tables = self._db, self._db.tables
        counts: AdmissionCounts | None = None

        def count() -> AdmissionCounts:
            workers = [entry.record for _, entry in db.find(tables.workers, "model", model)]
            takes = [
                worker for worker in workers if worker.phase in _TAKES and worker.renewed_at > renewed_after
            ]
            pools = [
                pool for _, pool in db.find(tables.pools, "model", model) if pool.reported_at > renewed_after
            ]
            ready = sum(worker.phase is WorkerPhase.READY for worker in takes)
            coming = max(sum(pool.maximum for pool in pools) - ready, 0)
            largest = max(1, max((worker.capacity for worker in workers), default=1))
            absorbs = any(pool.absorbs_at_maximum for pool in pools)
            alone = [worker for worker in takes if worker.classes is None]
            held = (worker.most_sessions if absorbs else worker.capacity for worker in alone)
            places, added = sum(held), coming * largest
            if (carried := _decode_sessions(pools)) is not None:
                added = min(added, max(carried - places, 0))
            places += added
            several = declaring(db, model)
            if several:
                room = shared_room(db, model, renewed_after, _TAKES, waits)
                places = max(0, places + room.with_coming)
            known = bool(pools) or any(worker.renewed_at > known_after for worker in (*workers, *several))
            demand = sum(takes_slot(entry.record) for _, entry in db.find(tables.sessions, "live", model))
            if tables.sessions in db.writes:
                live = sum(entry.ended_at is None for _, entry in db.all(tables.sessions))
            else:
                live = sum(len(keys) for keys in tables.sessions.values("live").values())
            taken = db.get(tables.sessions, session) is not None
            return AdmissionCounts(
                taken, live, ModelCapacity(model, known, places, demand), self._use(tenant, model)
            )

        def run() -> AdmissionCounts:
            nonlocal counts
            # As in Postgres, the counts are of the moment before a wait for the lock.
            counts = counts or count()
            return replace(counts, tenant=db.lock(tables.tenants, tenant)) if locks_tenant else counts

        return await db.execute(run)

    def _use(self, tenant: str, model: str) -> TenantUse:
        db, tables = self._db, self._db.tables
        records = [entry.record for _, entry in db.find(tables.sessions, "tenant", tenant)]
        wanting = [record for record in records if takes_slot(record)]
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

    async def outlook(self, model: str, *, since: float, renewed_after: float) -> Outlook:
        db, tables = self._db, self._db.tables

        def run() -> Outlook:
            workers = [entry.record for _, entry in db.find(tables.workers, "model", model)]
            live = [worker for worker in workers if worker.renewed_at > renewed_after]
            ready = [worker for worker in live if worker.phase is WorkerPhase.READY]
            pools = [
                pool for _, pool in db.find(tables.pools, "model", model) if pool.reported_at > renewed_after
            ]
            absorbs = any(pool.absorbs for pool in pools)
            rented = [db.get(tables.rentals, worker.id) for worker in workers]
            known = [
                row.starting_s for row in rented if row is not None and row.ready and row.ended_at is None
            ]
            alone = [worker for worker in ready if worker.classes is None]
            ready_slots = sum(worker.most_sessions if absorbs else worker.capacity for worker in alone)
            coming = max(sum(pool.maximum for pool in pools) - len(ready), 0)
            slots = max(1, max((worker.capacity for worker in workers), default=1))
            now = (WorkerPhase.READY,)
            if any(
                worker.phase in now and worker.renewed_at > renewed_after for worker in declaring(db, model)
            ):
                room = shared_room(db, model, renewed_after, now, waits)
                ready_slots = max(0, ready_slots + room.slots)
                coming, slots = coming + room.coming, max(slots, room.largest)
            starting = [worker.started_at for worker in live if worker.phase is WorkerPhase.STARTING]
            return Outlook(
                left=sum(
                    _left(entry, since) for _, entry in db.all(tables.sessions) if entry.record.model == model
                ),
                ready_slots=ready_slots,
                starting=tuple(sorted(starting)),
                coming=coming,
                slots=slots,
                start_up_s=sum(known) / len(known) if known else None,
            ).limited(_decode_sessions(pools))

        return await db.execute(run)

    async def session_times(self, model: str, *, since: float) -> tuple[SessionTimes, ...] | None:
        return await self._db.execute(lambda: self._session_times(model, since))

    def _session_times(self, model: str, since: float) -> tuple[SessionTimes, ...] | None:
        db, ended, live = self._db, list[tuple[SessionEntry, SessionTimes]](), list[SessionTimes]()
        for session, entry in db.all(db.tables.sessions):
            record, left_at = entry.record, entry.ended_at
            if record.model != model:
                continue
            idle = record.phase is Phase.SUSPENDED and record.activity is not Activity.WATCHING
            if left_at is None and idle:
                left_at = entry.suspended_at
            if (entry.ended_at is not None or idle) and (left_at is None or left_at <= since):
                continue
            times = SessionTimes(
                session,
                record.tenant,
                record.created_at,
                left_at,
                record.control_seq,
                record.next_chunk,
                record.phase.holds_slot,
                entry.ended_at is not None,
            )
            if times.ended:
                ended.append((entry, times))
            else:
                live.append(times)
        if len(live) > LIVE_LIMIT:
            return None
        for purged in (False, True):
            part = [times for entry, times in ended if (entry.purged_at is not None) is purged]
            part.sort(key=lambda times: (-(times.left_at or 0.0), times.session))
            live += part[:ENDED_LIMIT]
        return tuple(sorted(live, key=lambda times: times.session))

    async def slots_by_class(self, worker: str, *, besides: str) -> dict[str, int]:
        db, sessions = self._db, self._db.tables.sessions

        def run() -> dict[str, int]:
            found = dict(db.find(sessions, "worker", worker)) | dict(db.find(sessions, "target", worker))
            return Counter(
                entry.record.model
                for session, entry in found.items()
                if entry.ended_at is None and entry.record.phase.holds_slot and session != besides
            )

        return await db.execute(run)

    async def slots_used(self, worker: str, *, besides: str) -> int:
        db, sessions = self._db, self._db.tables.sessions

        def run() -> int:
            found = dict(db.find(sessions, "worker", worker)) | dict(db.find(sessions, "target", worker))
            return sum(
                entry.ended_at is None and entry.record.phase.holds_slot and session != besides
                for session, entry in found.items()
            )

        return await db.execute(run)

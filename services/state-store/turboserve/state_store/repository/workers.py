"""Rows of workers."""

from __future__ import annotations

from typing import Any

from sqlalchemy import delete, exists, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.sessions import Phase
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.state_store.ports.records import GONE_LISTED, WORKER_COUNTED, WORKER_FIELDS
from turboserve.state_store.tables import sessions, workers


def record_of(row: RowMapping, **counts: int) -> WorkerRecord:
    return WorkerRecord.model_validate({name: row[name] for name in WORKER_FIELDS} | counts)


def _values(record: WorkerRecord) -> dict[str, Any]:
    return record.model_dump(mode="json", exclude=set(WORKER_COUNTED))


class SqlWorkers:
    """`WorkerRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def get(self, worker: str, *, lock: bool = False) -> WorkerRecord | None:
        query = select(workers).where(workers.c.id == worker)
        row = (await self._db.execute(query.with_for_update() if lock else query)).mappings().first()
        return None if row is None else record_of(row)

    async def insert(self, record: WorkerRecord) -> bool:
        query = (
            pg_insert(workers).values(_values(record)).on_conflict_do_nothing(index_elements=[workers.c.id])
        )
        return (await self._db.execute(query.returning(workers.c.id))).first() is not None

    async def write(self, record: WorkerRecord, *, gone_at: float | None = None) -> None:
        values = _values(record) | {"gone_at": gone_at}
        await self._db.execute(update(workers).where(workers.c.id == record.id).values(values))

    async def page(self, *, include_gone: bool) -> list[WorkerRecord]:
        holds = sessions.c.phase.in_([phase.value for phase in Phase if phase.holds_slot])
        there = workers.c.phase != WorkerPhase.GONE.value
        gone = select(workers.c.id).where(~there).order_by(workers.c.gone_at.desc()).limit(GONE_LISTED)
        suspended = sessions.c.phase == Phase.SUSPENDED.value
        counts = (
            select(
                sessions.c.worker,
                func.count().filter(holds).label("sessions"),
                func.count().filter(suspended).label("suspended"),
            )
            .where(sessions.c.ended_at.is_(None), sessions.c.worker.is_not(None))
            .group_by(sessions.c.worker)
            .subquery()
        )
        coming = (
            select(sessions.c.target, func.count().label("incoming"))
            .where(sessions.c.target.is_not(None))
            .group_by(sessions.c.target)
            .subquery()
        )
        query = (
            select(workers, counts.c.sessions, counts.c.suspended, coming.c.incoming)
            .join(counts, counts.c.worker == workers.c.id, isouter=True)
            .join(coming, coming.c.target == workers.c.id, isouter=True)
            .where(there if not include_gone else or_(there, workers.c.id.in_(gone)))
            .order_by(workers.c.started_at, workers.c.id)
        )
        rows = (await self._db.execute(query)).mappings()
        return [record_of(row, **{name: row[name] or 0 for name in WORKER_COUNTED}) for row in rows]

    async def delete_gone(self, gone_before: float) -> int:
        named = exists().where(sessions.c.worker == workers.c.id, sessions.c.ended_at.is_(None))
        query = delete(workers).where(workers.c.gone_at < gone_before, ~named)
        return (await self._db.execute(query)).rowcount

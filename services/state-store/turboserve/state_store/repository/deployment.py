"""Rows of workers, leaders, pools and clocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ARRAY,
    Double,
    Select,
    Text,
    any_,
    bindparam,
    cast,
    delete,
    exists,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.leading import LeaderRecord
from turboserve.contracts.pool import PoolOrders, PoolReport
from turboserve.contracts.sessions import Phase
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.state_store.core.aging import Aging
from turboserve.state_store.ports.records import (
    GONE_LISTED,
    WORKER_COUNTED,
    WORKER_FIELDS,
    WORKER_LISTED,
    pool_orders,
    with_learned,
)
from turboserve.state_store.tables import clocks, leaders, pools, sessions, workers


def record_of(row: RowMapping, **counts: int) -> WorkerRecord:
    return WorkerRecord.model_validate({name: row[name] for name in WORKER_FIELDS} | counts)


def _with_sessions(record: WorkerRecord, counts: Mapping[tuple[str, str], int]) -> WorkerRecord:
    if record.classes is None:
        return record
    classes = tuple(
        one.model_copy(update={"sessions": counts.get((record.id, one.model), 0)}) for one in record.classes
    )
    return record.model_copy(update={"classes": classes})


def _values(record: WorkerRecord) -> dict[str, Any]:
    return record.model_dump(mode="json", exclude=set(WORKER_LISTED))


# Built once: SQLAlchemy takes longer to build such a statement and its cache key than to execute it.
_WORKER = select(workers).where(workers.c.id == bindparam("worker"))
_WORKER_LOCKED = _WORKER.with_for_update()
_FREE_WORKERS = (
    select(workers)
    .where(workers.c.id == any_(bindparam("these", type_=ARRAY(Text))))
    .with_for_update(skip_locked=True)
)
_RENEWED = (
    func.unnest(
        cast(bindparam("renewed_worker"), ARRAY(Text)), cast(bindparam("renewed_time"), ARRAY(Double))
    )
    .table_valued("worker", "time", name="renewed")
    .render_derived()
)
_WRITE_RENEWED_AT = (
    update(workers).where(workers.c.id == _RENEWED.c.worker).values(renewed_at=_RENEWED.c.time)
)
_WRITE_WORKER = update(workers).where(workers.c.id == bindparam("worker"))
_LEADER = select(leaders).where(leaders.c.name == bindparam("service"))
_LEADER_SHARED = _LEADER.with_for_update(read=True, key_share=True)
_LEADER_LOCKED = {new_term: _LEADER.with_for_update(key_share=not new_term) for new_term in (False, True)}
_WRITE_LEADER = update(leaders).where(leaders.c.name == bindparam("service"))


class SqlWorkers:
    """`WorkerRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def get(self, worker: str, *, lock: bool = False) -> WorkerRecord | None:
        found = await self._db.execute(_WORKER_LOCKED if lock else _WORKER, {"worker": worker})
        row = found.mappings().first()
        return None if row is None else record_of(row)

    async def lock_free(self, workers: Collection[str]) -> dict[str, WorkerRecord]:
        rows = (await self._db.execute(_FREE_WORKERS, {"these": list(workers)})).mappings()
        return {row["id"]: record_of(row) for row in rows}

    async def insert(self, record: WorkerRecord) -> bool:
        query = (
            pg_insert(workers).values(_values(record)).on_conflict_do_nothing(index_elements=[workers.c.id])
        )
        return (await self._db.execute(query.returning(workers.c.id))).first() is not None

    async def write(self, record: WorkerRecord, *, gone_at: float | None = None) -> None:
        values = _values(record) | {"gone_at": gone_at, "worker": record.id}
        await self._db.execute(_WRITE_WORKER, values)

    async def write_all(self, records: Sequence[WorkerRecord]) -> None:
        rows = [_values(record) | {"gone_at": None, "worker": record.id} for record in records]
        await self._db.execute(_WRITE_WORKER, rows)

    async def write_renewed_at(self, times: Mapping[str, float]) -> None:
        values = {"renewed_worker": list(times), "renewed_time": list(times.values())}
        await self._db.execute(_WRITE_RENEWED_AT, values)

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
        found = [record_of(row, **{name: row[name] or 0 for name in WORKER_COUNTED}) for row in rows]
        if all(record.classes is None for record in found):
            return found
        by_class = await self._sessions_by_class()
        return [_with_sessions(record, by_class) for record in found]

    async def _sessions_by_class(self) -> dict[tuple[str, str], int]:
        """Number of sessions that hold a slot, by worker and class."""
        holds = sessions.c.phase.in_([phase.value for phase in Phase if phase.holds_slot])
        query = select(sessions.c.worker, sessions.c.model, func.count()).where(
            sessions.c.ended_at.is_(None), sessions.c.worker.is_not(None), holds
        )
        rows = await self._db.execute(query.group_by(sessions.c.worker, sessions.c.model))
        return {(worker, model): count for worker, model, count in rows}

    async def delete_gone(self, gone_before: float) -> int:
        named = exists().where(sessions.c.worker == workers.c.id, sessions.c.ended_at.is_(None))
        query = delete(workers).where(workers.c.gone_at < gone_before, ~named)
        return (await self._db.execute(query)).rowcount


class SqlLeaders:
    """`LeaderRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def get(self, name: str) -> LeaderRecord:
        return await self._read(name, _LEADER)

    async def share(self, name: str) -> LeaderRecord:
        return await self._read(name, _LEADER_SHARED)

    async def lock(self, name: str, *, new_term: bool) -> LeaderRecord:
        query = _LEADER_LOCKED[new_term]
        row = (await self._db.execute(query, {"service": name})).mappings().first()
        if row is not None:
            return LeaderRecord.model_validate(dict(row))
        fresh = pg_insert(leaders).values(name=name, term=0, beat=0)
        await self._db.execute(fresh.on_conflict_do_nothing(index_elements=[leaders.c.name]))
        return await self._read(name, query)

    async def write(self, record: LeaderRecord) -> None:
        values = record.model_dump(exclude={"name"}) | {"service": record.name}
        await self._db.execute(_WRITE_LEADER, values)

    async def _read(self, name: str, query: Select[tuple[object, ...]]) -> LeaderRecord:
        row = (await self._db.execute(query, {"service": name})).mappings().first()
        return LeaderRecord(name=name) if row is None else LeaderRecord.model_validate(dict(row))


def _orders(row: RowMapping) -> PoolOrders:
    orders = ("version", "override", "dry_run", "table")
    return pool_orders({"pool": row["id"]} | {name: row[name] for name in orders})


class SqlPools:
    """`PoolRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def reported(self, report: PoolReport, now: float) -> PoolOrders:
        news = {"model": report.model, "maximum": report.maximum, "reported_at": now}
        news |= {"absorbs": report.absorbs, "absorbs_at_maximum": report.absorbs_at_maximum}
        news["decode_sessions"] = report.decode_sessions
        if report.learned is not None:
            news["learned"] = report.learned
        query = pg_insert(pools).values(id=report.pool, **news)
        query = query.on_conflict_do_update(index_elements=[pools.c.id], set_=news)
        row = (await self._db.execute(query.returning(pools))).mappings().one()
        return with_learned(_orders(row), row["learned"]) if report.recalls else _orders(row)

    async def processes(self, pool: str) -> tuple[str | None, tuple[str, ...]]:
        query = select(pools.c.process, pools.c.former).where(pools.c.id == pool).with_for_update()
        row = (await self._db.execute(query)).first()
        return (None, ()) if row is None else (row.process, tuple(row.former))

    async def replaced(self, pool: str, process: str, former: tuple[str, ...]) -> None:
        values = {"process": process, "former": list(former)}
        await self._db.execute(update(pools).where(pools.c.id == pool).values(values))

    async def get(self, pool: str, *, lock: bool = False) -> PoolOrders | None:
        query = select(pools).where(pools.c.id == pool)
        row = (await self._db.execute(query.with_for_update() if lock else query)).mappings().first()
        return None if row is None else _orders(row)

    async def write(self, orders: PoolOrders, changed: Collection[str]) -> None:
        values: dict[str, Any] = orders.model_dump(mode="json", include={*changed, "version"})
        await self._db.execute(update(pools).where(pools.c.id == orders.pool).values(values))


class SqlClocks:
    """`ClockRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def get(self, name: str) -> Aging | None:
        query = select(clocks.c.aged_to, clocks.c.wall).where(clocks.c.name == name).with_for_update()
        row = (await self._db.execute(query)).first()
        return None if row is None else Aging(row.aged_to, row.wall)

    async def put(self, name: str, aging: Aging) -> None:
        values = {"aged_to": aging.aged_to, "wall": aging.wall}
        query = pg_insert(clocks).values(name=name, **values)
        await self._db.execute(query.on_conflict_do_update(index_elements=[clocks.c.name], set_=values))

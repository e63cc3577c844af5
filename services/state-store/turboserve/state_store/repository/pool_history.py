"""The history of pools: samples, decisions, chunks of workers, cost. Past migrations and waiting sessions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, and_, delete, exists, func, literal, or_, select
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.selectable import FromClause

from turboserve.contracts.cost import ModelCost
from turboserve.contracts.pool_history import (
    ListLanes,
    ListMigrations,
    ListPoolDecisions,
    ListWaiting,
    MigrationPage,
    PastMigration,
    PoolDecision,
    PoolDecisionPage,
    PoolRange,
    PoolSample,
    StoredDecision,
    TenantCost,
    WaitingPage,
    WaitingSession,
    WorkerLane,
)
from turboserve.state_store.core.chunk_history import ChunkRow
from turboserve.state_store.core.paging import first_page
from turboserve.state_store.core.pool_history import ENDING, LAST, OWNING, ChunkCount, past_migration
from turboserve.state_store.history_tables import (
    pool_costs,
    pool_decisions,
    pool_model_costs,
    pool_samples,
    worker_chunks,
)
from turboserve.state_store.ports.pool_history import HistoryTable
from turboserve.state_store.repository import pool_cost
from turboserve.state_store.repository.admission import WAITS
from turboserve.state_store.tables import decisions, rentals, sessions, workers

_TABLES = {
    HistoryTable(table.name): table
    for table in (pool_samples, pool_decisions, worker_chunks, pool_costs, pool_model_costs)
}
_SAMPLE = [pool_samples.c[name] for name in PoolSample.model_fields]


def _within(at: ColumnElement[Any], request: PoolRange) -> ColumnElement[bool]:
    return and_(at >= request.since, at < request.until)


def _of_pool(worker: ColumnElement[Any], request: PoolRange) -> ColumnElement[bool]:
    """Whether the pool has started the worker; for a pool that starts none, whether no pool has."""
    started = rentals.c.pool == request.pool if request.managed else rentals.c.pool.is_not(None)
    found = exists().where(rentals.c.worker == worker, started)
    return found if request.managed else ~found


class SqlPoolHistory:
    """`PoolHistoryRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def add_sample(self, pool: str, at: int, sample: PoolSample) -> None:
        query = pg_insert(pool_samples).values(pool=pool, at=at, **sample.model_dump())
        news = {}
        for name in PoolSample.model_fields:
            old, new = pool_samples.c[name], query.excluded[name]
            # GREATEST ignores NULL.
            news[name] = func.coalesce(new, old) if name in LAST else func.greatest(old, new)
        key = [pool_samples.c.pool, pool_samples.c.at]
        await self._db.execute(query.on_conflict_do_update(index_elements=key, set_=news))

    async def add_decisions(self, pool: str, process: str, decisions: Sequence[PoolDecision]) -> None:
        if decisions:
            values = [
                {"pool": pool, "process": process, "process_number": one.number}
                | one.model_dump(mode="json", exclude={"number"})
                for one in decisions
            ]
            await self._db.execute(pg_insert(pool_decisions).on_conflict_do_nothing(), values)

    async def add_chunks(self, rows: Iterable[ChunkRow]) -> None:
        values = [asdict(row) for row in rows]
        if not values:
            return
        query = pg_insert(worker_chunks)
        news: dict[str, Any] = {
            name: worker_chunks.c[name] + query.excluded[name] for name in ("chunks", "late", "lowered")
        }
        news["body"] = worker_chunks.c.body.concat(query.excluded.body)
        key = [worker_chunks.c.worker, worker_chunks.c.at]
        await self._db.execute(query.on_conflict_do_update(index_elements=key, set_=news), values)

    async def samples(self, request: PoolRange) -> list[tuple[int, PoolSample]]:
        mine = and_(pool_samples.c.pool == request.pool, _within(pool_samples.c.at, request))
        query = select(pool_samples.c.at, *_SAMPLE).where(mine).order_by(pool_samples.c.at)
        rows = (await self._db.execute(query)).mappings()
        return [(row["at"], PoolSample.model_validate(dict(row))) for row in rows]

    async def chunk_counts(self, request: PoolRange) -> list[ChunkCount]:
        columns = worker_chunks.c
        sums = [func.sum(columns[name]) for name in ("chunks", "late", "lowered")]
        mine = and_(_within(columns.at, request), _of_pool(columns.worker, request))
        query = select(columns.at, *sums).where(mine).group_by(columns.at).order_by(columns.at)
        return [ChunkCount(*row) for row in await self._db.execute(query)]

    async def decisions(self, request: ListPoolDecisions) -> PoolDecisionPage:
        columns = pool_decisions.c
        mine = and_(columns.pool == request.pool, _within(columns.at, request))
        query = select(pool_decisions).where(mine).order_by(columns.number.desc()).limit(request.limit + 1)
        if request.after is not None:
            query = query.where(columns.number < request.after)
        rows = (await self._db.execute(query)).mappings().all()
        shown, after = first_page(rows, request.limit, itemgetter("number"))
        found = (_decision(row) for row in shown)
        return PoolDecisionPage(decisions=tuple(found), next=after)

    async def migrations(self, request: ListMigrations) -> MigrationPage:
        begun, over, owned = decisions.alias("begun"), decisions.alias("over"), decisions.alias("owned")
        ending = (
            select(over.c.kind, over.c.at, over.c.reason)
            .where(
                over.c.session == begun.c.session,
                over.c.number > begun.c.number,
                over.c.kind.in_(ENDING),
                over.c.numbers["migration"].as_float() == begun.c.version,
            )
            .order_by(over.c.number)
            .limit(1)
            .lateral("ending")
        )
        source = (
            select(owned.c.worker)
            .where(
                owned.c.session == begun.c.session, owned.c.number < begun.c.number, owned.c.kind.in_(OWNING)
            )
            .order_by(owned.c.number.desc())
            .limit(1)
            .scalar_subquery()
        )
        query = (
            select(
                begun,
                sessions.c.tenant,
                sessions.c.migration.label("current"),
                source.label("source"),
                ending.c.kind.label("over_kind"),
                ending.c.at.label("ended_at"),
                ending.c.reason.label("detail"),
            )
            .select_from(_joined(begun, ending))
            .where(
                begun.c.kind == "migrate",
                begun.c.version.is_not(None),
                _within(begun.c.at, request),
                _of_pool(begun.c.worker, request),
            )
            .order_by(begun.c.number.desc())
            .limit(request.limit + 1)
        )
        if request.after is not None:
            query = query.where(begun.c.number < request.after)
        rows = (await self._db.execute(query)).mappings().all()
        shown, after = first_page(rows, request.limit, itemgetter("number"))
        return MigrationPage(migrations=tuple(_migration(row) for row in shown), next=after)

    async def lanes(self, request: ListLanes) -> list[WorkerLane]:
        there = and_(
            workers.c.started_at < request.until,
            or_(workers.c.gone_at.is_(None), workers.c.gone_at >= request.since),
            _of_pool(workers.c.id, request),
        )
        columns = workers.c
        query = (
            select(
                columns.id.label("worker"),
                columns.pool_member.label("member"),
                *(columns[name] for name in ("phase", "capacity", "started_at", "gone_at")),
            )
            .where(there)
            .order_by(columns.id.collate("C"))
            .limit(request.limit + 1)
        )
        if request.after is not None:
            query = query.where(columns.id.collate("C") > request.after)
        return [WorkerLane.model_validate(dict(row)) for row in (await self._db.execute(query)).mappings()]

    async def chunks(self, worker: str, request: PoolRange) -> list[ChunkRow]:
        columns = worker_chunks.c
        mine = and_(columns.worker == worker, _within(columns.at, request))
        query = select(worker_chunks).where(mine).order_by(columns.at)
        return [ChunkRow(**row) for row in (await self._db.execute(query)).mappings()]

    async def tenants(self, named: Collection[str]) -> Mapping[str, str]:
        query = select(sessions.c.id, sessions.c.tenant).where(sessions.c.id.in_(list(named)))
        return {row.id: row.tenant for row in await self._db.execute(query)}

    async def costs(self, request: PoolRange) -> Mapping[int, tuple[float, float]]:
        return await pool_cost.by_minute(self._db, request)

    async def tenant_costs(self, request: PoolRange) -> list[TenantCost]:
        return await pool_cost.by_tenant(self._db, request)

    async def model_costs(self, request: PoolRange) -> list[ModelCost]:
        return await pool_cost.by_model(self._db, request)

    async def waiting(self, request: ListWaiting) -> WaitingPage:
        here = and_(WAITS, sessions.c.ended_at.is_(None))
        if request.model is not None:
            here = and_(here, sessions.c.model == request.model)
        columns = sessions.c
        reason = (
            select(decisions.c.reason)
            .where(decisions.c.session == columns.id)
            .order_by(decisions.c.number.desc())
            .limit(1)
            .scalar_subquery()
        )
        since = func.coalesce(columns.requested_at, columns.created_at)
        query = (
            select(
                columns.id.label("session"),
                *(columns[name] for name in ("tenant", "model", "weight")),
                since.label("since"),
                reason.label("reason"),
                func.count().over().label("total"),
            )
            .where(here)
            .order_by(since, columns.number)
            .limit(request.limit)
        )
        rows = (await self._db.execute(query)).mappings().all()
        found = tuple(WaitingSession.model_validate(dict(row)) for row in rows)
        return WaitingPage(sessions=found, total=rows[0]["total"] if rows else 0)

    async def oldest(self, table: HistoryTable) -> int | None:
        found = (await self._db.execute(select(func.min(_TABLES[table].c.at)))).scalar_one()
        return None if found is None else int(found)

    async def beyond(self, table: HistoryTable, rows: int) -> int | None:
        at = _TABLES[table].c.at
        found = (await self._db.execute(select(at).order_by(at.desc()).offset(rows).limit(1))).scalar()
        return None if found is None else int(found)

    async def delete_before(self, table: HistoryTable, at: int) -> None:
        await self._db.execute(delete(_TABLES[table]).where(_TABLES[table].c.at < at))


def _decision(row: RowMapping) -> StoredDecision:
    return StoredDecision.model_validate({**row, "id": row["number"], "number": row["process_number"]})


def _joined(begun: FromClause, ending: FromClause) -> FromClause:
    own = begun.join(sessions, sessions.c.id == begun.c.session)
    return own.join(ending, literal(value=True), isouter=True)


def _migration(row: RowMapping) -> PastMigration:
    return past_migration(
        row["over_kind"],
        runs=row["current"] == row["version"],
        **{name: row[name] for name in ("session", "tenant", "source", "reason", "numbers", "ended_at")},
        migration=row["version"],
        target=row["worker"],
        began_at=row["at"],
        detail=row["detail"] or "",
    )

"""Rentals, the shares of sessions in them, and corrections."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import and_, func, or_, select
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.cost import Correction, Cost, PoolCost, SessionCost
from turboserve.contracts.usage import HOURS, ListUsage, UsagePage
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.state_store.core.rentals import RentalRow
from turboserve.state_store.repository import usage
from turboserve.state_store.repository.accrual import ACCRUAL, DAY, HOUR, MINUTE
from turboserve.state_store.repository.deployment import record_of
from turboserve.state_store.tables import cost_corrections, rentals, session_costs, sessions, workers

LOCK = 0x7475_7262_0010
"""Number of the advisory lock of a transaction that counts, so that reports and accruals take turns."""

_OPEN = rentals.c.ended_at.is_(None)
_COLUMNS = tuple(field.name for field in fields(RentalRow))
_GPU_SECONDS = rentals.c.paid_s * rentals.c.gpus
_STARTING = rentals.c.starting_s * rentals.c.gpus
_ESTIMATED = rentals.c.estimated_s * rentals.c.gpus
_MONEY = _GPU_SECONDS * rentals.c.price_hour / 3_600.0

_CORRECTED = (
    select(
        cost_corrections.c.session,
        func.sum(cost_corrections.c.gpu_seconds).label("gpu_seconds"),
        func.sum(cost_corrections.c.money).label("money"),
    )
    .where(cost_corrections.c.session.is_not(None))
    .group_by(cost_corrections.c.session)
    .subquery("corrected")
)

_CORRECTION_COLUMNS = [cost_corrections.c[name] for name in Correction.model_fields]


def _row(row: RowMapping) -> RentalRow:
    return RentalRow(**{name: row[name] for name in _COLUMNS})


class SqlRentals:
    """`RentalRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def lock(self) -> None:
        await self._db.execute(select(func.pg_advisory_xact_lock(LOCK)))

    async def of_pool(self, pool: str, named: Collection[str]) -> dict[str, RentalRow]:
        mine = and_(rentals.c.pool == pool, _OPEN)
        query = select(rentals).where(or_(mine, rentals.c.worker.in_(named)))
        return {row["worker"]: _row(row) for row in (await self._db.execute(query)).mappings()}

    async def beside_workers(self) -> list[tuple[RentalRow | None, WorkerRecord]]:
        query = (
            select(workers, *(rentals.c[name].label(f"rental_{name}") for name in _COLUMNS))
            .join(rentals, rentals.c.worker == workers.c.id, isouter=True)
            .where(
                or_(
                    and_(rentals.c.worker.is_(None), workers.c.phase != WorkerPhase.GONE.value),
                    and_(rentals.c.worker.is_not(None), rentals.c.ended_at.is_(None)),
                )
            )
        )
        found = []
        for row in (await self._db.execute(query)).mappings():
            values = {name: row[f"rental_{name}"] for name in _COLUMNS}
            rental = None if values["worker"] is None else RentalRow(**values)
            found.append((rental, record_of(row)))
        return found

    async def put(self, rows: Iterable[RentalRow]) -> None:
        values = [asdict(row) for row in rows]
        if not values:
            return
        query = pg_insert(rentals)
        kept = {"worker", "accrued_s"}
        news = {name: query.excluded[name] for name in _COLUMNS if name not in kept}
        query = query.on_conflict_do_update(index_elements=[rentals.c.worker], set_=news)
        # Rows beside the statement: SQLAlchemy compiles a statement that holds several rows each time.
        await self._db.execute(query, values)

    async def accrue(self, hour: int, minute: int) -> None:
        await self._db.execute(ACCRUAL, {DAY.key: hour // HOURS, HOUR.key: hour, MINUTE.key: minute})

    async def usage(self, request: ListUsage) -> UsagePage:
        return await usage.page(self._db, request)

    async def forget_usage(self, before_day: int) -> None:
        await usage.forget(self._db, before_day)

    async def by_kind(self) -> list[dict[str, Any]]:
        query = (
            select(
                rentals.c.kind,
                func.count().label("workers"),
                func.count().filter(_OPEN).label("running"),
                func.sum(_GPU_SECONDS).label("gpu_seconds"),
                func.sum(_STARTING).label("starting_gpu_seconds"),
                func.sum(_ESTIMATED).label("estimated_gpu_seconds"),
                func.sum(_MONEY).label("money"),
                func.min(rentals.c.started_at).label("since"),
            )
            .group_by(rentals.c.kind)
            .order_by(rentals.c.kind)
        )
        return [dict(row) for row in (await self._db.execute(query)).mappings()]

    async def by_pool(self) -> list[PoolCost]:
        query = (
            select(
                rentals.c.pool, func.sum(_GPU_SECONDS).label("gpu_seconds"), func.sum(_MONEY).label("money")
            )
            .group_by(rentals.c.pool)
            .order_by(rentals.c.pool.asc().nulls_last())
        )
        return [PoolCost.model_validate(dict(row)) for row in (await self._db.execute(query)).mappings()]

    async def used(self) -> Cost:
        query = select(
            func.coalesce(func.sum(session_costs.c.gpu_seconds), 0.0).label("gpu_seconds"),
            func.coalesce(func.sum(session_costs.c.money), 0.0).label("money"),
        )
        return Cost.model_validate(dict((await self._db.execute(query)).mappings().one()))

    async def of_sessions(self, tenant: str | None, session: str | None, limit: int) -> list[SessionCost]:
        query = (
            select(
                sessions.c.id.label("session"),
                sessions.c.model,
                sessions.c.phase,
                func.coalesce(session_costs.c.gpu_seconds, 0.0).label("gpu_seconds"),
                func.coalesce(session_costs.c.money, 0.0).label("money"),
                func.coalesce(_CORRECTED.c.gpu_seconds, 0.0).label("corrected_gpu_seconds"),
                func.coalesce(_CORRECTED.c.money, 0.0).label("corrected_money"),
            )
            .join(session_costs, session_costs.c.session == sessions.c.id, isouter=True)
            .join(_CORRECTED, _CORRECTED.c.session == sessions.c.id, isouter=True)
            .order_by(sessions.c.number.desc())
            .limit(limit)
        )
        if tenant is not None:
            query = query.where(sessions.c.tenant == tenant)
        if session is not None:
            query = query.where(sessions.c.id == session)
        return [SessionCost.model_validate(dict(row)) for row in (await self._db.execute(query)).mappings()]


class SqlCorrections:
    """`CorrectionRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def add(self, correction: Correction) -> Correction:
        query = pg_insert(cost_corrections).values(**correction.model_dump())
        await self._db.execute(query.on_conflict_do_nothing(index_elements=[cost_corrections.c.id]))
        found = await self._db.execute(
            select(*_CORRECTION_COLUMNS).where(cost_corrections.c.id == correction.id)
        )
        return Correction.model_validate(dict(found.mappings().one()))

    async def total(self, session: str | None = None) -> Cost:
        query = select(
            func.coalesce(func.sum(cost_corrections.c.gpu_seconds), 0.0).label("gpu_seconds"),
            func.coalesce(func.sum(cost_corrections.c.money), 0.0).label("money"),
        )
        if session is not None:
            query = query.where(cost_corrections.c.session == session)
        return Cost.model_validate(dict((await self._db.execute(query)).mappings().one()))

    async def newest(self, tenant: str | None, limit: int) -> list[Correction]:
        query = select(*_CORRECTION_COLUMNS).order_by(cost_corrections.c.number.desc()).limit(limit)
        if tenant is not None:
            query = query.join(sessions, sessions.c.id == cost_corrections.c.session).where(
                sessions.c.tenant == tenant
            )
        return [Correction.model_validate(dict(row)) for row in (await self._db.execute(query)).mappings()]

    async def share(self, session: str) -> Cost | None:
        given = select(session_costs.c.gpu_seconds, session_costs.c.money)
        query = given.where(session_costs.c.session == session)
        row = (await self._db.execute(query)).mappings().first()
        if row is not None:
            return Cost.model_validate(dict(row))
        known = (await self._db.execute(select(sessions.c.id).where(sessions.c.id == session))).first()
        return None if known is None else Cost(gpu_seconds=0.0, money=0.0)

"""Corrections of cost. Rows are added and never changed."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.cost import Correction, Cost
from turboserve.state_store.tables import cost_corrections, session_costs, sessions

_COLUMNS = [cost_corrections.c[name] for name in Correction.model_fields]


class SqlCorrections:
    """`CorrectionRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def add(self, correction: Correction) -> Correction:
        query = pg_insert(cost_corrections).values(**correction.model_dump())
        await self._db.execute(query.on_conflict_do_nothing(index_elements=[cost_corrections.c.id]))
        found = await self._db.execute(select(*_COLUMNS).where(cost_corrections.c.id == correction.id))
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
        query = select(*_COLUMNS).order_by(cost_corrections.c.number.desc()).limit(limit)
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

"""Corrections of cost: rows that are added and never changed."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.cost import Correction, Cost
from turboserve.state_store.tables import cost_corrections, session_costs, sessions

_COLUMNS = [cost_corrections.c[name] for name in Correction.model_fields]


async def add(db: AsyncConnection, correction: Correction) -> Correction:
    """Write it; if its id is known, the row that has it, which stays as it is."""
    query = pg_insert(cost_corrections).values(**correction.model_dump())
    await db.execute(query.on_conflict_do_nothing(index_elements=[cost_corrections.c.id]))
    found = await db.execute(select(*_COLUMNS).where(cost_corrections.c.id == correction.id))
    return Correction.model_validate(dict(found.mappings().one()))


async def total(db: AsyncConnection, session: str | None = None) -> Cost:
    """The sum of all corrections, or of those of one session."""
    query = select(
        func.coalesce(func.sum(cost_corrections.c.gpu_seconds), 0.0).label("gpu_seconds"),
        func.coalesce(func.sum(cost_corrections.c.money), 0.0).label("money"),
    )
    if session is not None:
        query = query.where(cost_corrections.c.session == session)
    return Cost.model_validate(dict((await db.execute(query)).mappings().one()))


async def newest(db: AsyncConnection, tenant: str | None, limit: int) -> list[Correction]:
    """The newest ones; of a tenant, those of its sessions."""
    query = select(*_COLUMNS).order_by(cost_corrections.c.number.desc()).limit(limit)
    if tenant is not None:
        query = query.join(sessions, sessions.c.id == cost_corrections.c.session).where(
            sessions.c.tenant == tenant
        )
    return [Correction.model_validate(dict(row)) for row in (await db.execute(query)).mappings()]


async def share(db: AsyncConnection, session: str) -> Cost | None:
    """What a session has been given; None: there never was one of this id."""
    given = select(session_costs.c.gpu_seconds, session_costs.c.money)
    query = given.where(session_costs.c.session == session)
    row = (await db.execute(query)).mappings().first()
    if row is not None:
        return Cost.model_validate(dict(row))
    known = (await db.execute(select(sessions.c.id).where(sessions.c.id == session))).first()
    return None if known is None else Cost(gpu_seconds=0.0, money=0.0)

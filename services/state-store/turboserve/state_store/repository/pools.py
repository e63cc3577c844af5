"""One row per pool: what operators have ordered, and what the pool last said of itself."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import ValidationError
from sqlalchemy import select, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve import logs
from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.pool import PoolOrders, PoolReport
from turboserve.state_store.tables import pools

log = logs.get("pools")

_warned: set[tuple[str, int]] = set()


async def reported(db: AsyncConnection, report: PoolReport, now: float) -> PoolOrders:
    """Note what the pool says; its orders."""
    news = {"model": report.model, "maximum": report.maximum, "reported_at": now}
    query = pg_insert(pools).values(id=report.pool, **news)
    query = query.on_conflict_do_update(index_elements=[pools.c.id], set_=news)
    return _orders((await db.execute(query.returning(pools))).mappings().one())


async def processes(db: AsyncConnection, pool: str) -> tuple[str | None, tuple[str, ...]]:
    """The process that reports for the pool, and those that it has replaced. Locks the row, if there is
    one."""
    query = select(pools.c.process, pools.c.former).where(pools.c.id == pool).with_for_update()
    row = (await db.execute(query)).first()
    return (None, ()) if row is None else (row.process, tuple(row.former))


async def replaced(db: AsyncConnection, pool: str, process: str, former: tuple[str, ...]) -> None:
    """Note which process reports for the pool now."""
    values = {"process": process, "former": list(former)}
    await db.execute(update(pools).where(pools.c.id == pool).values(values))


async def get(db: AsyncConnection, pool: str, *, lock: bool = False) -> PoolOrders | None:
    query = select(pools).where(pools.c.id == pool)
    row = (await db.execute(query.with_for_update() if lock else query)).mappings().first()
    return None if row is None else _orders(row)


async def write(db: AsyncConnection, orders: PoolOrders, changed: Collection[str]) -> None:
    """Write the orders named in `changed`, and the version; the caller holds the row's lock."""
    values: dict[str, Any] = orders.model_dump(mode="json", include={*changed, "version"})
    await db.execute(update(pools).where(pools.c.id == orders.pool).values(values))


def _orders(row: RowMapping) -> PoolOrders:
    values = {name: row[name] for name in PoolOrders.model_fields if name != "pool"}
    try:
        return PoolOrders.model_validate({"pool": row["id"], **values})
    except (ValidationError, InvalidInputError) as error:
        if values["table"] is None:
            raise
        orders = PoolOrders.model_validate({"pool": row["id"], **values, "table": None})
        if (orders.pool, orders.version) not in _warned:
            # A report a second reads the row: one line for each table is enough.
            _warned.add((orders.pool, orders.version))
            log.warning(
                "the stored profile table cannot be read: the shipped one is in force",
                pool=orders.pool,
                version=orders.version,
                error=str(error)[:500],
            )
        return orders

"""Rows of pools: the orders of operators, and the pool's last report."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.pool import PoolOrders, PoolReport
from turboserve.state_store.ports.records import pool_orders
from turboserve.state_store.tables import pools


def _orders(row: RowMapping) -> PoolOrders:
    return pool_orders(
        {"pool": row["id"]} | {name: row[name] for name in PoolOrders.model_fields if name != "pool"}
    )


class SqlPools:
    """`PoolRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def reported(self, report: PoolReport, now: float) -> PoolOrders:
        news = {"model": report.model, "maximum": report.maximum, "reported_at": now}
        query = pg_insert(pools).values(id=report.pool, **news)
        query = query.on_conflict_do_update(index_elements=[pools.c.id], set_=news)
        return _orders((await self._db.execute(query.returning(pools))).mappings().one())

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

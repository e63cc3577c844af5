"""What pools have cost in the past: over time, by tenant and by model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.cost import ModelCost
from turboserve.contracts.pool_history import TENANTS_LIMIT, PoolRange, TenantCost
from turboserve.state_store.history_tables import pool_costs, pool_model_costs


async def by_minute(db: AsyncConnection, request: PoolRange) -> Mapping[int, tuple[float, float]]:
    """See `PoolHistoryRepository.costs`."""
    rows = await db.execute(_sums(pool_costs, pool_costs.c.at, request))
    return {row[0]: (row[1], row[2]) for row in rows}


async def by_tenant(db: AsyncConnection, request: PoolRange) -> list[TenantCost]:
    rows = await db.execute(_largest(pool_costs, pool_costs.c.tenant, request))
    return [TenantCost(tenant=row[0] or None, gpu_seconds=row[1], money=row[2]) for row in rows]


async def by_model(db: AsyncConnection, request: PoolRange) -> list[ModelCost]:
    rows = await db.execute(_largest(pool_model_costs, pool_model_costs.c.model, request))
    return [ModelCost(model=row[0] or None, gpu_seconds=row[1], money=row[2]) for row in rows]


def _sums(table: Table, by: ColumnElement[Any], request: PoolRange) -> Select[Any]:
    columns = table.c
    pool = request.pool if request.managed else ""
    query = select(by, func.sum(columns.gpu_seconds).label("paid"), func.sum(columns.money))
    query = query.where(columns.pool == pool, columns.at >= request.since, columns.at < request.until)
    return query.group_by(by)


def _largest(table: Table, by: ColumnElement[Any], request: PoolRange) -> Select[Any]:
    query = _sums(table, by, request)
    return query.order_by(query.selected_columns.paid.desc(), by.collate("C")).limit(TENANTS_LIMIT)

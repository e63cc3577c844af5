"""What pools have cost in the past: over time, by tenant and by model. Parts of statements."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from turboserve.contracts.cost import Cost, ModelCost
from turboserve.contracts.pool_history import TENANTS_LIMIT, PoolRange, TenantCost
from turboserve.simulation.runtime.rows.session import Session
from turboserve.simulation.runtime.rows.tables import Table

Costs = Table[tuple[str, str, int], Cost]
"""By pool, by tenant or model, and by minute."""


def by_minute(db: Session, request: PoolRange) -> Mapping[int, tuple[float, float]]:
    """See `PoolHistoryRepository.costs`."""
    return _sums(db, db.tables.pool_costs, request, 2)


def by_tenant(db: Session, request: PoolRange) -> list[TenantCost]:
    found = _largest(db, db.tables.pool_costs, request)
    return [TenantCost(tenant=name or None, gpu_seconds=gpu, money=money) for name, (gpu, money) in found]


def by_model(db: Session, request: PoolRange) -> list[ModelCost]:
    found = _largest(db, db.tables.pool_model_costs, request)
    return [ModelCost(model=name or None, gpu_seconds=gpu, money=money) for name, (gpu, money) in found]


def _largest(db: Session, table: Costs, request: PoolRange) -> list[tuple[str, tuple[float, float]]]:
    sums: dict[str, tuple[float, float]] = _sums(db, table, request, 1)
    return sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))[:TENANTS_LIMIT]


def _sums(db: Session, table: Costs, request: PoolRange, place: int) -> dict[Any, tuple[float, float]]:
    """Return the sums by a member of the key: by tenant or model (`place` 1), or by time (2)."""
    wanted = request.pool if request.managed else ""
    sums: dict[Hashable, tuple[float, float]] = {}
    for key, cost in db.all(table):
        if key[0] == wanted and request.since <= key[2] < request.until:
            gpu_seconds, money = sums.get(key[place], (0.0, 0.0))
            sums[key[place]] = gpu_seconds + cost.gpu_seconds, money + cost.money
    return sums

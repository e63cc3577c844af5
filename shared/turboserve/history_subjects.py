"""The part of `subjects` about the past of pools."""

from __future__ import annotations

from turboserve.contracts import pool_history
from turboserve.contracts.base import Contract
from turboserve.subject_types import Endpoint

_STORE = "state-store"
GET_POOL_HISTORY = Endpoint(
    "state.history.get", pool_history.GetPoolHistory, pool_history.PoolHistory, _STORE, ("gateway",)
)
LIST_POOL_DECISIONS = Endpoint(
    "state.history.decisions",
    pool_history.ListPoolDecisions,
    pool_history.PoolDecisionPage,
    _STORE,
    ("gateway",),
)
LIST_MIGRATIONS = Endpoint(
    "state.history.migrations", pool_history.ListMigrations, pool_history.MigrationPage, _STORE, ("gateway",)
)
LIST_LANES = Endpoint(
    "state.history.lanes", pool_history.ListLanes, pool_history.LanePage, _STORE, ("gateway",)
)
GET_POOL_COST = Endpoint(
    "state.history.cost", pool_history.GetPoolCost, pool_history.PastCost, _STORE, ("gateway",)
)
LIST_WAITING = Endpoint(
    "state.history.waiting", pool_history.ListWaiting, pool_history.WaitingPage, _STORE, ("gateway",)
)

ENDPOINTS: tuple[Endpoint[Contract, Contract], ...] = (  # type: ignore[assignment]
    GET_POOL_HISTORY,
    LIST_POOL_DECISIONS,
    LIST_MIGRATIONS,
    LIST_LANES,
    GET_POOL_COST,
    LIST_WAITING,
)

"""REST: /v1/pools/{pool}/history, decisions, migrations, workers, cost and queue."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from turboserve import history_subjects
from turboserve.contracts.base import Id
from turboserve.contracts.keys import Scope
from turboserve.contracts.pool_history import (
    COST_S,
    SAMPLE_S,
    GetPoolCost,
    GetPoolHistory,
    ListLanes,
    ListMigrations,
    ListPoolDecisions,
    ListWaiting,
)
from turboserve.gateway.auth.middleware import needs
from turboserve.gateway.console.cost_schemas import ModelShare, PoolCostHistory, WaitingList
from turboserve.gateway.console.ranges import Context, CostStep, Known, Past, SampleStep
from turboserve.gateway.console.schemas import (
    PastDecisionList,
    PastMigrationList,
    PastPointList,
    WorkerLaneList,
)
from turboserve.gateway.paging import AfterNumber
from turboserve.gateway.problems.schemas import problems

CHUNKS_UP_TO_S = 300.0
"""Length of a range up to which each chunk has its own bar, unless the request names a step."""
BARS = 180
"""Number of bars of a session at most, in a longer range."""

router = APIRouter(prefix="/v1/pools/{pool}", tags=["pools"], dependencies=[needs(Scope.POOL_WRITE)])
_NEEDS = " Needs the scope `pool:write`."
_ERRORS = problems(401, 404, 422)
Limit = Annotated[int, Query(ge=1, le=500, description="Maximum number of entries.", examples=[100])]


@router.get(
    "/history",
    operation_id="get_pool_history",
    summary="Read a pool's past",
    description="Demand, capacity, workers, waiting sessions, late chunks and quality over time, of all "
    "tenants. Steps without a report of the autoscaler are left out." + _NEEDS,
    responses=_ERRORS,
)
async def get_history(past: Past, gateway: Context, step: SampleStep = None) -> PastPointList:
    step_s = past.step_s(step, SAMPLE_S)
    request = GetPoolHistory(**past.values, step_s=step_s)
    found = await gateway.bus.call(history_subjects.GET_POOL_HISTORY, request)
    return PastPointList.model_validate({"step_s": step_s, **found.model_dump()})


@router.get(
    "/decisions",
    operation_id="list_pool_decisions",
    summary="List a pool's decisions, newest first",
    description="Decisions of the controller with their numbers, and the autoscaler's actions, by page."
    + _NEEDS,
    responses=_ERRORS,
)
async def list_decisions(
    past: Past, gateway: Context, limit: Limit = 100, after: AfterNumber = None
) -> PastDecisionList:
    request = ListPoolDecisions(**past.values, limit=limit, after=after)
    found = await gateway.bus.call(history_subjects.LIST_POOL_DECISIONS, request)
    return PastDecisionList.model_validate(found.model_dump())


@router.get(
    "/migrations",
    operation_id="list_pool_migrations",
    summary="List migrations to a pool's workers, newest first",
    description="Migrations of all tenants' sessions that began in the range, with their reasons and "
    "numbers, by page." + _NEEDS,
    responses=_ERRORS,
)
async def list_migrations(
    past: Past, gateway: Context, limit: Limit = 100, after: AfterNumber = None
) -> PastMigrationList:
    request = ListMigrations(**past.values, limit=limit, after=after)
    found = await gateway.bus.call(history_subjects.LIST_MIGRATIONS, request)
    return PastMigrationList.model_validate(found.model_dump())


@router.get(
    "/workers",
    operation_id="list_pool_workers",
    summary="List a pool's workers and their chunks",
    description="The workers of the range, each with the chunks that it made for each session, by page. A "
    "page ends early after 10,000 bars." + _NEEDS,
    responses=_ERRORS,
)
async def list_workers(
    past: Past,
    gateway: Context,
    step: Annotated[
        int | None,
        Query(
            ge=0,
            le=86_400,
            description="Seconds. One bar has the chunks of a session that were published in the same step. "
            "0: each chunk has its own bar. Default: 0 in a range of up to 300 s.",
            examples=[0],
        ),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200, description="Maximum number of workers.", examples=[50])] = 50,
    after: Annotated[
        Id | None, Query(description="The `next` of the page before.", examples=["wk_5f3a9c"])
    ] = None,
) -> WorkerLaneList:
    length_s = past.until - past.since
    if step is None:
        step = 0 if length_s <= CHUNKS_UP_TO_S else max(int(length_s / BARS), 1)
    request = ListLanes(**past.values, step_s=step, limit=limit, after=after)
    found = await gateway.bus.call(history_subjects.LIST_LANES, request)
    return WorkerLaneList.model_validate({"step_s": step, **found.model_dump()})


@router.get(
    "/cost",
    operation_id="get_pool_cost",
    summary="Read what a pool has cost",
    description="The cost over time, and the shares of the tenants and of the models. A minute's cost is "
    "known a few seconds after it." + _NEEDS,
    responses=_ERRORS,
)
async def get_cost(past: Past, gateway: Context, step: CostStep = None) -> PoolCostHistory:
    step_s = past.step_s(step, COST_S)
    request = GetPoolCost(**past.values, step_s=step_s)
    found = await gateway.bus.call(history_subjects.GET_POOL_COST, request)
    models = [ModelShare.of(one) for one in found.models]
    return PoolCostHistory.model_validate({"step_s": step_s, **found.model_dump(), "models": models})


@router.get(
    "/queue",
    operation_id="list_pool_queue",
    summary="List who waits for a slot",
    description="Sessions of all tenants that want a slot of the pool's model and have none, longest wait "
    "first." + _NEEDS,
    responses=_ERRORS,
)
async def list_queue(pool: Known, gateway: Context, limit: Limit = 100) -> WaitingList:
    request = ListWaiting(model=pool.model, limit=limit)
    found = await gateway.bus.call(history_subjects.LIST_WAITING, request)
    return WaitingList.model_validate({"at": gateway.clock.wall(), **found.model_dump()})

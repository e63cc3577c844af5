"""REST: /v1/pool and /v1/cost."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query

from turboserve.contracts.autoscale import ProfileTable
from turboserve.contracts.base import Id
from turboserve.contracts.cost import CorrectCost, Correction, CostReport, GetCost
from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.pool import OrderPool
from turboserve.gateway.auth.dependency import Caller, Tenant
from turboserve.gateway.auth.service import Identity
from turboserve.gateway.context import Gateway, gateway_of
from turboserve.gateway.problems.schemas import BODY, problems
from turboserve.gateway.scaling.errors import NotAnOperatorError, PoolNotManagedError
from turboserve.gateway.scaling.pool_snapshots import PoolSnapshot
from turboserve.gateway.scaling.schemas import CostCorrection, DryRun, Orders, Override, Pool
from turboserve.ids import new_id
from turboserve.subjects import CORRECT_COST, GET_COST, ORDER_POOL

router = APIRouter(prefix="/v1", tags=["pool"])

Context = Annotated[Gateway, Depends(gateway_of)]
Name = Annotated[Id | None, Query(description="Which pool, where there are several.")]
REFUSALS = problems(*BODY, 401, 403, 404, 409)


@router.get("/pool", summary="Its size, and why", responses=problems(401, 404, 422))
async def pool(_tenant: Tenant, gateway: Context, pool: Name = None) -> Pool:
    return Pool.of(gateway.pools.snapshot(pool))


@router.get("/pool/orders", summary="What is ordered of the pool", responses=problems(401, 404, 409, 422))
async def orders(_tenant: Tenant, gateway: Context, pool: Name = None) -> Orders:
    return await _order(gateway, _managed(gateway, pool))


@router.put("/pool/override", summary="Keep so many workers, whatever the load", responses=REFUSALS)
async def override(body: Override, caller: Caller, gateway: Context, pool: Name = None) -> Orders:
    snapshot = _managed(gateway, pool, caller)
    scaling = snapshot.status.scaling
    assert scaling is not None
    if body.workers is not None and not scaling.least <= body.workers <= scaling.most:
        raise InvalidInputError(
            f"workers: {body.workers} is not within the pool's limits, {scaling.least} to {scaling.most}",
            field="workers",
            limit=f"{scaling.least} to {scaling.most}",
        )
    return await _order(gateway, snapshot, "override", override=body.workers)


@router.put("/pool/dry-run", summary="Only say what would be done, or do it", responses=REFUSALS)
async def dry_run(body: DryRun, caller: Caller, gateway: Context, pool: Name = None) -> Orders:
    return await _order(gateway, _managed(gateway, pool, caller), "dry_run", dry_run=body.dry_run)


@router.put("/pool/table", summary="Replace the table of profiled parameters", responses=REFUSALS)
async def put_table(body: ProfileTable, caller: Caller, gateway: Context, pool: Name = None) -> Orders:
    return await _order(gateway, _managed(gateway, pool, caller), "table", table=body)


@router.delete(
    "/pool/table",
    summary="Go back to the table that ships",
    responses=problems(401, 403, 404, 409, 422),
)
async def delete_table(caller: Caller, gateway: Context, pool: Name = None) -> Orders:
    return await _order(gateway, _managed(gateway, pool, caller), "table")


@router.get(
    "/cost",
    summary="GPU-seconds and money, in all and by session",
    description="Sums are over everybody; sessions are the tenant's own, newest first.",
    responses=problems(401, 404, 422),
)
async def cost(
    caller: Caller,
    gateway: Context,
    session: Annotated[Id | None, Query(description="Only this session.")] = None,
    limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
) -> CostReport:
    request = GetCost(tenant=caller.tenant, session=session, limit=limit, every_correction=caller.operator)
    return await gateway.bus.call(GET_COST, request)


@router.post(
    "/cost/corrections",
    status_code=201,
    summary="Add to the cost, or take from it",
    description="For operators. It is kept with its reason and shown in the report; nothing that was "
    "measured is changed. A request that is sent again with the same `id` makes no second one.",
    responses=problems(*BODY, 401, 403, 404, 409),
)
async def correct(body: CostCorrection, caller: Caller, gateway: Context) -> Correction:
    _check_operator(caller)
    request = CorrectCost(**{**body.model_dump(), "id": body.id or new_id("cor"), "by": caller.tenant})
    return await gateway.bus.call(CORRECT_COST, request)


def _check_operator(caller: Identity) -> None:
    if not caller.operator:
        raise NotAnOperatorError(f"tenant {caller.tenant} is no operator", field="tenant")


def _managed(gateway: Gateway, pool: str | None, caller: Identity | None = None) -> PoolSnapshot:
    """Return the last report of a managed pool. Raises typed errors, also if `caller` is no operator."""
    if caller is not None:
        _check_operator(caller)
    snapshot = gateway.pools.snapshot(pool)
    if snapshot.status.scaling is None:
        raise PoolNotManagedError("the workers of this pool are started by someone else", field="pool")
    return snapshot


async def _order(
    gateway: Gateway,
    snapshot: PoolSnapshot,
    *change: Literal["override", "dry_run", "table"],
    **values: object,
) -> Orders:
    order = OrderPool.model_validate({"pool": snapshot.status.pool, "change": change, **values})
    return Orders.of(await gateway.bus.call(ORDER_POOL, order))

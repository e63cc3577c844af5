"""REST: /v1/pools."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path
from starlette.requests import HTTPConnection

from turboserve.contracts.errors import InvalidInputError, NotFoundError, UnavailableError
from turboserve.contracts.keys import Scope
from turboserve.contracts.pool import OrderPool
from turboserve.gateway.audit.recorder import AuditedRoute
from turboserve.gateway.auth.middleware import Caller, Tenant, needs
from turboserve.gateway.pools.errors import PoolNotManagedError
from turboserve.gateway.pools.profile_schemas import NewProfile
from turboserve.gateway.pools.schemas import Pool, PoolDryRun, PoolList, PoolOrderSet, PoolOverride
from turboserve.gateway.pools.snapshots import RETRY_S, PoolSnapshot, PoolSnapshots
from turboserve.gateway.problems.schemas import BODY, problems

router = APIRouter(prefix="/v1/pools", tags=["pools"], route_class=AuditedRoute)


def _snapshots_of(connection: HTTPConnection) -> PoolSnapshots:
    found: PoolSnapshots = connection.app.state.gateway.pools
    return found


Snapshots = Annotated[PoolSnapshots, Depends(_snapshots_of)]
PoolId = Annotated[
    str, Path(description="Id of the pool: its autoscaler's `TURBOSERVE_POOL_NAME`.", examples=["local"])
]
PUT = problems(*BODY, 401, 403, 404, 409)
DELETE = problems(401, 403, 404, 409)
_NEEDS = " Needs the scope `pool:write`."


@router.get(
    "",
    dependencies=[needs(Scope.SESSIONS_READ)],
    operation_id="list_pools",
    summary="List pools",
    description="All pools, each with its size, its members and the reasons for its size.",
    responses=problems(401),
)
async def list_pools(caller: Caller, pools: Snapshots) -> PoolList:
    return PoolList(pools=[Pool.of(snapshot, caller.operator) for snapshot in pools.all()])


@router.get(
    "/{pool}",
    dependencies=[needs(Scope.SESSIONS_READ)],
    operation_id="get_pool",
    summary="Read a pool",
    description="The size of one pool, its members and the reasons for its size.",
    responses=problems(401, 404),
)
async def get_pool(pool: PoolId, caller: Caller, pools: Snapshots) -> Pool:
    return Pool.of(pools.snapshot(pool), caller.operator)


@router.get(
    "/{pool}/orders",
    dependencies=[needs(Scope.SESSIONS_READ)],
    operation_id="get_pool_orders",
    summary="Read a pool's orders",
    description="The stored orders. The pool has applied them when its `orders_version` is their `version`.",
    responses=problems(401, 404, 409),
)
async def get_pool_orders(pool: PoolId, _tenant: Tenant, pools: Snapshots) -> PoolOrderSet:
    return await _order(pools, _managed(pools, pool))


@router.put(
    "/{pool}/override",
    dependencies=[needs(Scope.POOL_WRITE)],
    operation_id="set_pool_override",
    summary="Fix the number of workers",
    description="The pool keeps this number of workers, whatever the load." + _NEEDS,
    responses=PUT,
)
async def set_override(pool: PoolId, body: PoolOverride, pools: Snapshots) -> PoolOrderSet:
    snapshot = _managed(pools, pool)
    scaling = snapshot.status.scaling
    assert scaling is not None
    if not scaling.least <= body.workers <= scaling.most:
        raise InvalidInputError(
            f"workers: {body.workers} is not within the pool's limits, {scaling.least} to {scaling.most}",
            field="workers",
            limit=scaling.least if body.workers < scaling.least else scaling.most,
        )
    return await _order(pools, snapshot, "override", override=body.workers)


@router.delete(
    "/{pool}/override",
    dependencies=[needs(Scope.POOL_WRITE)],
    operation_id="delete_pool_override",
    summary="Let the controller decide the number of workers",
    description="Removes the override. Without an override, it changes nothing but the version." + _NEEDS,
    responses=DELETE,
)
async def delete_override(pool: PoolId, pools: Snapshots) -> PoolOrderSet:
    return await _order(pools, _managed(pools, pool), "override")


@router.put(
    "/{pool}/dry-run",
    dependencies=[needs(Scope.POOL_WRITE)],
    operation_id="set_pool_dry_run",
    summary="Switch a pool's dry run on or off",
    description="In a dry run the controller reports what it would do and changes nothing." + _NEEDS,
    responses=PUT,
)
async def set_dry_run(pool: PoolId, body: PoolDryRun, pools: Snapshots) -> PoolOrderSet:
    return await _order(pools, _managed(pools, pool), "dry_run", dry_run=body.dry_run)


@router.delete(
    "/{pool}/dry-run",
    dependencies=[needs(Scope.POOL_WRITE)],
    operation_id="delete_pool_dry_run",
    summary="Return a pool's dry run to the settings",
    description="Removes the order; `TURBOSERVE_SCALE_DRY_RUN` of the autoscaler decides." + _NEEDS,
    responses=DELETE,
)
async def delete_dry_run(pool: PoolId, pools: Snapshots) -> PoolOrderSet:
    return await _order(pools, _managed(pools, pool), "dry_run")


@router.put(
    "/{pool}/profile",
    dependencies=[needs(Scope.POOL_WRITE)],
    operation_id="set_pool_profile",
    summary="Replace a pool's table of profiled parameters",
    description="Takes the file that `turboserve profile autoscaler` writes. The table covers volatility "
    "from 0 up without gaps or overlaps, and its last level is open." + _NEEDS,
    responses=PUT,
)
async def set_profile(pool: PoolId, body: NewProfile, pools: Snapshots) -> PoolOrderSet:
    return await _order(pools, _managed(pools, pool), "table", table=body.table())


@router.delete(
    "/{pool}/profile",
    dependencies=[needs(Scope.POOL_WRITE)],
    operation_id="delete_pool_profile",
    summary="Return a pool to the default profile",
    description="Removes the order; the autoscaler uses its default table." + _NEEDS,
    responses=DELETE,
)
async def delete_profile(pool: PoolId, pools: Snapshots) -> PoolOrderSet:
    return await _order(pools, _managed(pools, pool), "table")


def _managed(pools: PoolSnapshots, pool: str) -> PoolSnapshot:
    """Return the last report of a pool whose workers its autoscaler starts. Raises typed errors."""
    snapshot = pools.snapshot(pool)
    if snapshot.status.scaling is None:
        raise PoolNotManagedError(
            "Another system starts the workers of this pool, so it takes no orders.", field="pool"
        )
    return snapshot


async def _order(
    pools: PoolSnapshots,
    snapshot: PoolSnapshot,
    *change: Literal["override", "dry_run", "table"],
    **values: object,
) -> PoolOrderSet:
    pool = snapshot.status.pool
    order = OrderPool.model_validate({"pool": pool, "change": change, **values})
    try:
        return PoolOrderSet.of(await pools.order(order))
    except NotFoundError:
        # The autoscaler has reported to the gateways, and its first report to the state store is under way.
        raise UnavailableError(
            f"The state store has no report of pool {pool} yet.", field="pool", retry_after_s=RETRY_S
        ) from None

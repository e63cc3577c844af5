"""REST: /v1/cost."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from turboserve.contracts.base import Id
from turboserve.contracts.cost import CorrectCost, GetCost
from turboserve.contracts.keys import Scope
from turboserve.gateway.audit.recorder import AuditedRoute
from turboserve.gateway.auth.middleware import Caller, needs
from turboserve.gateway.context import Gateway, gateway_of
from turboserve.gateway.cost.schemas import Correction, CostReport, NewCorrection
from turboserve.gateway.problems.schemas import BODY, problems
from turboserve.ids import new_id
from turboserve.subjects import CORRECT_COST, GET_COST

router = APIRouter(prefix="/v1/cost", tags=["cost"], route_class=AuditedRoute)

Context = Annotated[Gateway, Depends(gateway_of)]


@router.get(
    "",
    dependencies=[needs(Scope.SESSIONS_READ)],
    operation_id="get_cost",
    summary="Read the cost",
    description="GPU-seconds and money, in total, by pool and by session. Sums are over all tenants; the "
    "listed sessions are the tenant's own.",
    responses=problems(401, 404, 422),
)
async def get_cost(
    caller: Caller,
    gateway: Context,
    session: Annotated[
        Id | None, Query(description="Only the share of this session.", examples=["ses_5f3a9c"])
    ] = None,
    limit: Annotated[
        int, Query(ge=1, le=1_000, description="Maximum number of sessions.", examples=[100])
    ] = 100,
) -> CostReport:
    request = GetCost(tenant=caller.tenant, session=session, limit=limit, every_correction=caller.operator)
    return CostReport.of(await gateway.bus.call(GET_COST, request))


@router.post(
    "/corrections",
    dependencies=[needs(Scope.POOL_WRITE)],
    operation_id="create_cost_correction",
    status_code=201,
    summary="Correct the cost",
    description="Adds an amount to the cost, or subtracts it. The correction is kept with its reason; "
    "measured amounts never change. A repeat with the same `id` makes no second correction. Needs the "
    "scope `pool:write`.",
    responses=problems(*BODY, 401, 403, 404, 409),
)
async def create_correction(body: NewCorrection, caller: Caller, gateway: Context) -> Correction:
    request = CorrectCost(**{**body.model_dump(), "id": body.id or new_id("cor"), "by": caller.tenant})
    made = await gateway.bus.call(CORRECT_COST, request)
    return Correction.model_validate(made.model_dump())

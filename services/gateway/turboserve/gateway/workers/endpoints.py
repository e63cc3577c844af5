"""REST: /v1/models and /v1/workers."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from turboserve.contracts.keys import Scope
from turboserve.contracts.requests import ListWorkers
from turboserve.contracts.sessions import PROMPT_LIMIT
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.gateway.auth.middleware import Tenant, needs
from turboserve.gateway.context import Gateway, gateway_of
from turboserve.gateway.problems.schemas import problems
from turboserve.gateway.workers.schemas import Model, ModelList, Worker, WorkerList
from turboserve.subjects import LIST_WORKERS

router = APIRouter(prefix="/v1")


@router.get(
    "/models",
    dependencies=[needs(Scope.SESSIONS_READ)],
    tags=["models"],
    operation_id="list_models",
    summary="List models",
    description="The models that ready workers serve now, and what each understands of a prompt.",
    responses=problems(401),
)
async def list_models(_tenant: Tenant, gateway: Annotated[Gateway, Depends(gateway_of)]) -> ModelList:
    page = await gateway.bus.call(LIST_WORKERS, ListWorkers())
    serving: dict[str, list[WorkerRecord]] = {}
    for worker in page.workers:
        if worker.phase is WorkerPhase.READY:
            serving.setdefault(worker.model, []).append(worker)
    return ModelList(
        models=[
            Model(
                id=name,
                default=name == gateway.settings.default_model,
                workers=len(workers),
                capacity=sum(worker.capacity for worker in workers),
                sessions=sum(worker.sessions for worker in workers),
                prompt_limit=PROMPT_LIMIT,
                prompt_guide=gateway.prompt_guides.get(name),
            )
            for name, workers in sorted(serving.items())
        ]
    )


@router.get(
    "/workers",
    dependencies=[needs(Scope.SESSIONS_READ)],
    tags=["workers"],
    operation_id="list_workers",
    summary="List workers",
    description="The workers of all pools: phase, load and measured chunk latency.",
    responses=problems(401, 422),
)
async def list_workers(
    _tenant: Tenant,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    include_gone: Annotated[
        bool, Query(description="Whether to list gone workers as well.", examples=[False])
    ] = False,
) -> WorkerList:
    page = await gateway.bus.call(LIST_WORKERS, ListWorkers(include_gone=include_gone))
    return WorkerList(workers=[Worker.of(record) for record in page.workers])

"""REST: /v1/models and /v1/workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from turboserve.allocation.classes import SessionClass
from turboserve.contracts.keys import Scope
from turboserve.contracts.requests import ListWorkers
from turboserve.contracts.sessions import PROMPT_LIMIT
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.gateway.auth.middleware import Tenant, needs
from turboserve.gateway.context import Gateway, gateway_of
from turboserve.gateway.model_offers import by_class
from turboserve.gateway.problems.schemas import problems
from turboserve.gateway.prompt_guides import PromptGuide
from turboserve.gateway.sessions.control_schemas import ModelControl
from turboserve.gateway.workers.schemas import Model, ModelList, ModelSize, Worker, WorkerList
from turboserve.subjects import LIST_WORKERS

router = APIRouter(prefix="/v1")


@router.get(
    "/models",
    dependencies=[needs(Scope.SESSIONS_READ)],
    tags=["models"],
    operation_id="list_models",
    summary="List models",
    description="The models that ready workers serve now, what each understands of a prompt, the typed "
    "controls that it takes, and the frame sizes that a session may ask for, with what serves each.",
    responses=problems(401),
)
async def list_models(_tenant: Tenant, gateway: Annotated[Gateway, Depends(gateway_of)]) -> ModelList:
    page = await gateway.bus.call(LIST_WORKERS, ListWorkers())
    serving: dict[str, dict[str, list[WorkerRecord]]] = {}
    for worker in by_class(page.workers):
        if worker.phase is WorkerPhase.READY:
            classes = serving.setdefault(SessionClass.of_name(worker.model).model, {})
            classes.setdefault(worker.model, []).append(worker)
    default = gateway.settings.default_model
    guides = gateway.prompt_guides
    models = [describe_model(name, of, default, guides.get(name)) for name, of in sorted(serving.items())]
    return ModelList(models=models)


def describe_model(
    name: str, classes: Mapping[str, Sequence[WorkerRecord]], default: str, guide: PromptGuide | None
) -> Model:
    """Describe a model. `classes`: its ready workers by the class that they serve."""
    workers = [worker for of_class in classes.values() for worker in of_class]
    # A worker may serve the model at several sizes. It holds as many sessions as of one of them.
    capacities: dict[str, int] = {}
    for worker in workers:
        capacities[worker.id] = max(worker.capacity, capacities.get(worker.id, 0))
    is_default = SessionClass.of_name(default).model == name
    usual = default if is_default else name
    return Model(
        id=name,
        default=is_default,
        workers=len(capacities),
        capacity=sum(capacities.values()),
        sessions=sum(worker.sessions for worker in workers),
        prompt_limit=PROMPT_LIMIT,
        prompt_guide=guide,
        controls=_controls(workers),
        sizes=[
            ModelSize.of(served, of_class, default=served == usual)
            for served, of_class in sorted(classes.items(), key=lambda one: (one[0] != usual, one[0]))
        ],
    )


def _controls(workers: Iterable[WorkerRecord]) -> list[ModelControl]:
    declaring = [worker for worker in workers if worker.controls]
    newest = max(declaring, key=lambda worker: worker.started_at, default=None)
    return [] if newest is None else [ModelControl.of(declared) for declared in newest.controls]


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

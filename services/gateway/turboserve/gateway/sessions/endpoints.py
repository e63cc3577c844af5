"""REST: /v1/sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Response

from turboserve.contracts.base import Text
from turboserve.contracts.sessions import Phase
from turboserve.gateway.auth.dependency import Caller, Tenant
from turboserve.gateway.context import Gateway, gateway_of
from turboserve.gateway.problems.schemas import BODY, problems
from turboserve.gateway.sessions.schemas import (
    DecisionList,
    DecisionView,
    NewMigration,
    NewPrompt,
    NewSession,
    Receipt,
    Session,
    SessionList,
    StartedMigration,
)

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])

Context = Annotated[Gateway, Depends(gateway_of)]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        description="A repeat under the same key does nothing more than the first request did.",
    ),
]

LOCATION = {"headers": {"Location": {"schema": {"type": "string"}, "description": "Path of the session."}}}


@router.post(
    "",
    status_code=201,
    summary="Create a session",
    responses={201: LOCATION, **problems(*BODY, 401, 429)},
)
async def create(
    body: NewSession,
    response: Response,
    tenant: Tenant,
    gateway: Context,
    idempotency_key: IdempotencyKey = None,
) -> Session:
    record = await gateway.sessions.create(tenant, body, idempotency_key)
    session = Session.of(record)
    response.headers["Location"] = session.links.self
    return session


@router.get("", summary="List sessions, newest first", responses=problems(401, 422))
async def list_sessions(
    tenant: Tenant,
    gateway: Context,
    phase: Annotated[list[Phase] | None, Query(description="Only these; repeat it for several.")] = None,
    limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
    after: Annotated[Text | None, Query(max_length=256, description="The `next` of the page before.")] = None,
) -> SessionList:
    page = await gateway.sessions.page(tenant, tuple(dict.fromkeys(phase or ())), limit, after)
    return SessionList(sessions=[Session.of(record) for record in page.sessions], next=page.next)


@router.get("/{session}", summary="Read a session", responses=problems(401, 404))
async def read(session: str, tenant: Tenant, gateway: Context) -> Session:
    return Session.of(await gateway.sessions.get(tenant, session))


@router.delete("/{session}", summary="End a session; again, it stays ended", responses=problems(401, 404))
async def end(session: str, tenant: Tenant, gateway: Context) -> Session:
    return Session.of(await gateway.sessions.end(tenant, session))


@router.post(
    "/{session}/prompts",
    status_code=202,
    summary="Change the prompt from the next chunk on",
    responses=problems(*BODY, 401, 404, 409, 429),
)
async def prompt(
    session: str,
    body: NewPrompt,
    tenant: Tenant,
    gateway: Context,
    idempotency_key: IdempotencyKey = None,
) -> Receipt:
    return Receipt.of(await gateway.sessions.prompt(tenant, session, body.prompt, idempotency_key))


@router.post(
    "/{session}/pause",
    status_code=202,
    summary="Stop making video and free the slot; again, it stays paused",
    responses=problems(401, 404, 409),
)
async def pause(session: str, tenant: Tenant, gateway: Context) -> Session:
    return Session.of(await gateway.sessions.pause(tenant, session))


@router.post(
    "/{session}/resume",
    status_code=202,
    summary="Make video again from where it stopped; again, it goes on",
    responses=problems(401, 404, 409, 429),
)
async def resume(session: str, tenant: Tenant, gateway: Context) -> Session:
    return Session.of(await gateway.sessions.resume(tenant, session))


@router.post(
    "/{session}/migrate",
    status_code=202,
    summary="Migrate it to another worker while it plays",
    description="A tenant migrates its own sessions, an operator all sessions.",
    responses=problems(*BODY, 401, 404, 409, 429),
)
async def migrate(
    session: str, caller: Caller, gateway: Context, body: NewMigration | None = None
) -> StartedMigration:
    owner = None if caller.operator else caller.tenant
    return StartedMigration.of(await gateway.sessions.migrate(owner, session, body.worker if body else None))


@router.get(
    "/{session}/decisions",
    summary="The scheduler's decisions about a session",
    responses=problems(401, 404),
)
async def decisions(session: str, tenant: Tenant, gateway: Context) -> DecisionList:
    page = await gateway.sessions.decisions(tenant, session)
    return DecisionList(decisions=[DecisionView.of(decision) for decision in page.decisions])

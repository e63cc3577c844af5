"""REST: /v1/sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Response

from turboserve.contracts.base import Text
from turboserve.contracts.sessions import Phase
from turboserve.gateway.auth.middleware import Caller, Tenant
from turboserve.gateway.context import Gateway, gateway_of
from turboserve.gateway.problems.schemas import BODY, problems
from turboserve.gateway.sessions.parameters import SessionId
from turboserve.gateway.sessions.schemas import (
    DecisionList,
    NewMigration,
    NewPrompt,
    NewSession,
    Receipt,
    Session,
    SessionDecision,
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
        description="Makes a repeat harmless: a second request with the same key gets the answer of the "
        "first. The same key with another request is refused.",
        examples=["order-17"],
    ),
]

LOCATION = {"headers": {"Location": {"schema": {"type": "string"}, "description": "Path of the session."}}}


@router.post(
    "",
    operation_id="create_session",
    status_code=201,
    summary="Create a session",
    description="The scheduler places the session on a worker, which generates video at once. A request over "
    "a limit, or without a free slot, is answered 429.",
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


@router.get(
    "",
    operation_id="list_sessions",
    summary="List sessions, newest first",
    description="The tenant's own sessions, also those that have ended, by page.",
    responses=problems(401, 422),
)
async def list_sessions(
    tenant: Tenant,
    gateway: Context,
    phase: Annotated[
        list[Phase] | None,
        Query(
            description="Only sessions in this phase. May be repeated.", examples=[["active", "suspended"]]
        ),
    ] = None,
    limit: Annotated[
        int, Query(ge=1, le=1_000, description="Maximum number of sessions on the page.", examples=[100])
    ] = 100,
    after: Annotated[
        Text | None,
        Query(max_length=256, description="The `next` of the page before.", examples=["1024"]),
    ] = None,
) -> SessionList:
    page = await gateway.sessions.page(tenant, tuple(dict.fromkeys(phase or ())), limit, after)
    return SessionList(sessions=[Session.of(record) for record in page.sessions], next=page.next)


@router.get(
    "/{session}",
    operation_id="get_session",
    summary="Read a session",
    description="The session's state now. The playhead is that of its viewers.",
    responses=problems(401, 404),
)
async def read(session: SessionId, tenant: Tenant, gateway: Context) -> Session:
    return Session.of(await gateway.sessions.get(tenant, session))


@router.delete(
    "/{session}",
    operation_id="end_session",
    summary="End a session",
    description="Viewers get the video that is already generated. A repeat gets the same answer.",
    responses=problems(401, 404),
)
async def end(session: SessionId, tenant: Tenant, gateway: Context) -> Session:
    return Session.of(await gateway.sessions.end(tenant, session))


@router.post(
    "/{session}/prompts",
    operation_id="submit_prompt",
    status_code=202,
    summary="Change the prompt",
    description="Takes effect at the next chunk. The event `prompt.applied` names that chunk. If a later "
    "prompt takes effect first, the event is `prompt.superseded`.",
    responses=problems(*BODY, 401, 404, 409, 429),
)
async def prompt(
    session: SessionId,
    body: NewPrompt,
    tenant: Tenant,
    gateway: Context,
    idempotency_key: IdempotencyKey = None,
) -> Receipt:
    return Receipt.of(await gateway.sessions.prompt(tenant, session, body.prompt, idempotency_key))


@router.post(
    "/{session}/pause",
    operation_id="pause_session",
    status_code=202,
    summary="Pause a session",
    description="Stops generation, frees the slot, and keeps the state. A repeat gets the same answer.",
    responses=problems(401, 404, 409),
)
async def pause(session: SessionId, tenant: Tenant, gateway: Context) -> Session:
    return Session.of(await gateway.sessions.pause(tenant, session))


@router.post(
    "/{session}/resume",
    operation_id="resume_session",
    status_code=202,
    summary="Resume a session",
    description="Generation continues where it stopped, once a worker has a free slot. A repeat, or a "
    "request for a session that runs, gets the same answer.",
    responses=problems(401, 404, 409, 429),
)
async def resume(session: SessionId, tenant: Tenant, gateway: Context) -> Session:
    return Session.of(await gateway.sessions.resume(tenant, session))


@router.post(
    "/{session}/migrate",
    operation_id="migrate_session",
    status_code=202,
    summary="Migrate a session",
    description="Copies the session's state to another worker while it plays. The event `session.migrated` "
    "or `session.migration_abandoned` ends the migration. A tenant migrates its own sessions, an operator "
    "all sessions.",
    responses=problems(*BODY, 401, 404, 409, 429),
)
async def migrate(
    session: SessionId, caller: Caller, gateway: Context, body: NewMigration | None = None
) -> StartedMigration:
    owner = None if caller.operator else caller.tenant
    return StartedMigration.of(await gateway.sessions.migrate(owner, session, body.worker if body else None))


@router.get(
    "/{session}/decisions",
    operation_id="list_session_decisions",
    summary="List the scheduler's decisions about a session",
    description="Where the session was placed or migrated, and why, with the numbers that were compared.",
    responses=problems(401, 404),
)
async def decisions(session: SessionId, tenant: Tenant, gateway: Context) -> DecisionList:
    page = await gateway.sessions.decisions(tenant, session)
    return DecisionList(decisions=[SessionDecision.of(decision) for decision in page.decisions])

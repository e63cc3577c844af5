"""REST: /v1/sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from starlette.requests import HTTPConnection

from turboserve.contracts.base import Text
from turboserve.contracts.keys import Scope
from turboserve.contracts.links import Role
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.gateway.audit.recorder import AuditedRoute
from turboserve.gateway.auth.access import Identity
from turboserve.gateway.auth.middleware import Caller, Tenant, needs
from turboserve.gateway.problems.schemas import BODY, RATES, problems
from turboserve.gateway.public import rate_headers
from turboserve.gateway.sessions.control_schemas import ControlReceipt, NewControl, NewPrompt, Receipt
from turboserve.gateway.sessions.migration_schemas import (
    DecisionList,
    NewMigration,
    SessionDecision,
    StartedMigration,
)
from turboserve.gateway.sessions.parameters import IdempotencyKey, SessionId
from turboserve.gateway.sessions.schemas import (
    NewSession,
    Playout,
    Session,
    SessionChange,
    SessionList,
)
from turboserve.gateway.sessions.service import Sessions
from turboserve.gateway.timeline.service import TimelineService

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])
migrations = APIRouter(route_class=AuditedRoute)


def _service_of(connection: HTTPConnection) -> Sessions:
    found: Sessions = connection.app.state.gateway.sessions
    return found


def _timeline_of(connection: HTTPConnection) -> TimelineService:
    found: TimelineService = connection.app.state.gateway.timeline
    return found


def _shown(record: SessionRecord, caller: Identity, playout: Playout | None = None) -> Session:
    """Return the session as the caller may see it: the metadata is its tenant's."""
    session = Session.of(record, playout)
    return session if caller.grant is None else session.model_copy(update={"metadata": {}})


Service = Annotated[Sessions, Depends(_service_of)]
Playbacks = Annotated[TimelineService, Depends(_timeline_of)]
LOCATION = {"Location": {"schema": {"type": "string"}, "description": "Path of the session."}}


@router.post(
    "",
    dependencies=[needs(Scope.SESSIONS_WRITE)],
    operation_id="create_session",
    status_code=201,
    summary="Create a session",
    description="The scheduler places the session on a worker, which generates video at once. A request over "
    "a limit, or without a free slot, is answered 429.",
    responses={201: {"headers": {**LOCATION, **RATES}}, **problems(*BODY, 401, 429)},
)
async def create(
    body: NewSession,
    response: Response,
    caller: Caller,
    sessions: Service,
    idempotency_key: IdempotencyKey = None,
) -> Session:
    record = await sessions.create(caller.tenant, body, idempotency_key, caller.key_id)
    session = Session.of(record)
    response.headers["Location"] = session.links.self
    response.headers.update(rate_headers(record.rates))
    return session


@router.get(
    "",
    dependencies=[needs(Scope.SESSIONS_READ)],
    operation_id="list_sessions",
    summary="List sessions, newest first",
    description="The tenant's own sessions, also those that have ended, by page.",
    responses=problems(401, 422),
)
async def list_sessions(
    tenant: Tenant,
    sessions: Service,
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
    page = await sessions.page(tenant, tuple(dict.fromkeys(phase or ())), limit, after)
    return SessionList(sessions=[Session.of(record) for record in page.sessions], next=page.next)


@router.get(
    "/{session}",
    dependencies=[needs(Scope.SESSIONS_READ, Role.VIEWER)],
    operation_id="get_session",
    summary="Read a session",
    description="The session's state now. The playhead is that of its viewers; `playout` says how urgent the "
    "session is.",
    responses=problems(401, 404),
)
async def read(session: SessionId, caller: Caller, sessions: Service, timeline: Playbacks) -> Session:
    record = await sessions.get(caller.tenant, session)
    view = timeline.view(record.id)
    if view is None:
        return _shown(record, caller)
    return _shown(
        record, caller, Playout(slack_s=view.slack_s, credit_s=view.worker_credit_s, tier=view.tier)
    )


@router.patch(
    "/{session}",
    dependencies=[needs(Scope.SESSIONS_WRITE, Role.CONTROLLER)],
    operation_id="change_session",
    summary="Change a session",
    description="Sets what the request has, from the next chunk on; what it leaves out stays. The event "
    "`session.changed` follows. A repeat gets the same answer.",
    responses=problems(*BODY, 401, 404, 409, 429),
)
async def change(session: SessionId, body: SessionChange, caller: Caller, sessions: Service) -> Session:
    return _shown(await sessions.change(caller.tenant, session, body), caller)


@router.delete(
    "/{session}",
    dependencies=[needs(Scope.SESSIONS_WRITE)],
    operation_id="end_session",
    summary="End a session",
    description="Viewers get the video that is already generated. A repeat gets the same answer.",
    responses=problems(401, 404),
)
async def end(session: SessionId, tenant: Tenant, sessions: Service) -> Session:
    return Session.of(await sessions.end(tenant, session))


@router.post(
    "/{session}/prompts",
    dependencies=[needs(Scope.SESSIONS_WRITE, Role.CONTROLLER)],
    operation_id="submit_prompt",
    status_code=202,
    summary="Change the prompt",
    description="Takes effect at the next chunk. The event `prompt.applied` names that chunk. If a later "
    "prompt takes effect first, the event is `prompt.superseded`. With `drop_buffer`, viewers skip to that "
    "chunk.",
    responses={202: {"headers": RATES}, **problems(*BODY, 401, 404, 409, 429)},
)
async def prompt(
    session: SessionId,
    body: NewPrompt,
    response: Response,
    tenant: Tenant,
    sessions: Service,
    idempotency_key: IdempotencyKey = None,
) -> Receipt:
    receipt = await sessions.prompt(
        tenant, session, body.prompt, idempotency_key, drop_buffer=body.drop_buffer
    )
    response.headers.update(rate_headers(receipt.rates))
    return Receipt.of(receipt)


@router.post(
    "/{session}/controls",
    dependencies=[needs(Scope.SESSIONS_WRITE, Role.CONTROLLER)],
    operation_id="set_control",
    status_code=202,
    summary="Set a control",
    description="Sets one of the model's typed controls (`/v1/models`) from the next chunk on. The event "
    "`control.applied` names that chunk. If a later value of the control takes effect first, the event is "
    "`control.superseded`. Values last until they are set again, also under later prompts. Limits per time "
    "are those of prompts.",
    responses={202: {"headers": RATES}, **problems(*BODY, 401, 404, 409, 429)},
)
async def control(
    session: SessionId,
    body: NewControl,
    response: Response,
    tenant: Tenant,
    sessions: Service,
    idempotency_key: IdempotencyKey = None,
) -> ControlReceipt:
    receipt = await sessions.set_control(tenant, session, body, idempotency_key)
    response.headers.update(rate_headers(receipt.rates))
    return ControlReceipt.of(receipt)


@router.post(
    "/{session}/pause",
    dependencies=[needs(Scope.SESSIONS_WRITE, Role.CONTROLLER)],
    operation_id="pause_session",
    status_code=202,
    summary="Pause a session",
    description="Stops generation, frees the slot, and keeps the state. A repeat gets the same answer.",
    responses=problems(401, 404, 409),
)
async def pause(session: SessionId, caller: Caller, sessions: Service) -> Session:
    return _shown(await sessions.pause(caller.tenant, session), caller)


@router.post(
    "/{session}/resume",
    dependencies=[needs(Scope.SESSIONS_WRITE, Role.CONTROLLER)],
    operation_id="resume_session",
    status_code=202,
    summary="Resume a session",
    description="Generation continues where it stopped, once a worker has a free slot. A repeat, or a "
    "request for a session that runs, gets the same answer.",
    responses=problems(401, 404, 409, 429),
)
async def resume(session: SessionId, caller: Caller, sessions: Service) -> Session:
    return _shown(await sessions.resume(caller.tenant, session), caller)


@migrations.post(
    "/{session}/migrate",
    dependencies=[needs(Scope.SESSIONS_WRITE)],
    operation_id="migrate_session",
    status_code=202,
    summary="Migrate a session",
    description="Copies the session's state to another worker while it plays. The event `session.migrated` "
    "or `session.migration_abandoned` ends the migration. A tenant migrates its own sessions; with the "
    "scope `pool:write` all sessions.",
    responses=problems(*BODY, 401, 404, 409, 429),
)
async def migrate(
    session: SessionId, caller: Caller, sessions: Service, body: NewMigration | None = None
) -> StartedMigration:
    owner = None if caller.operator else caller.tenant
    return StartedMigration.of(await sessions.migrate(owner, session, body.worker if body else None))


@router.get(
    "/{session}/decisions",
    dependencies=[needs(Scope.SESSIONS_READ)],
    operation_id="list_session_decisions",
    summary="List the scheduler's decisions about a session",
    description="Where the session was placed or migrated, and why, with the numbers that were compared.",
    responses=problems(401, 404),
)
async def decisions(session: SessionId, tenant: Tenant, sessions: Service) -> DecisionList:
    page = await sessions.decisions(tenant, session)
    return DecisionList(decisions=[SessionDecision.of(decision) for decision in page.decisions])


router.include_router(migrations)

"""REST: /v1/sessions/{id}/tickets and /v1/sessions/{id}/links."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Response
from starlette.requests import HTTPConnection

from turboserve.contracts.keys import Scope
from turboserve.contracts.links import Role
from turboserve.gateway.audit.recorder import AuditedRoute
from turboserve.gateway.auth.middleware import Caller, Tenant, needs
from turboserve.gateway.problems.schemas import BODY, problems
from turboserve.gateway.sessions.parameters import SessionId, idempotency_header
from turboserve.gateway.sharing.schemas import Link, LinkList, NewLink, NewLinkText, NewTicket, Ticket
from turboserve.gateway.sharing.service import Sharing

router = APIRouter(prefix="/v1/sessions", tags=["sharing"])
links = APIRouter(route_class=AuditedRoute)


def _service_of(connection: HTTPConnection) -> Sharing:
    found: Sharing = connection.app.state.gateway.sharing
    return found


Service = Annotated[Sharing, Depends(_service_of)]
LinkId = Annotated[str, Path(description="Id of the link.", examples=["lnk_5f3a9c"])]
RepeatLink = Annotated[
    str | None,
    idempotency_header(
        "a second request with the same key creates no second link. The same key with another request is "
        "refused.",
        alias="Idempotency-Key",
    ),
]


@router.post(
    "/{session}/tickets",
    dependencies=[needs(Scope.SESSIONS_READ, Role.VIEWER)],
    operation_id="create_ticket",
    status_code=201,
    summary="Create a ticket for the session's streams",
    description="Clients that cannot set a header, such as a browser's WebSocket, put the ticket into the "
    "address: `?ticket=`. It opens streams of this session for about a minute. A stream ends when the API "
    "key or link of this request ends.",
    responses=problems(*BODY, 401, 404),
)
async def create_ticket(
    session: SessionId, response: Response, caller: Caller, sharing: Service, body: NewTicket | None = None
) -> Ticket:
    text, grant = await sharing.ticket(caller, session, body.role if body else None)
    response.headers["Cache-Control"] = "no-store"
    return Ticket(ticket=text, role=grant.role, expires_at=grant.expires_at)  # type: ignore[arg-type]


@links.post(
    "/{session}/links",
    dependencies=[needs(Scope.SESSIONS_WRITE)],
    operation_id="create_link",
    status_code=201,
    summary="Create a link to the session",
    description="A holder of the link may watch the session, and with the role `controller` also control it. "
    "Only this answer has the link's text. Every gateway accepts it at once.",
    responses=problems(*BODY, 401, 404, 409),
)
async def create_link(
    session: SessionId,
    response: Response,
    caller: Caller,
    sharing: Service,
    body: NewLink | None = None,
    idempotency_key: RepeatLink = None,
) -> NewLinkText:
    record, token = await sharing.create(caller, session, body or NewLink.model_validate({}), idempotency_key)
    response.headers["Cache-Control"] = "no-store"
    return NewLinkText.created(record, token)


@links.get(
    "/{session}/links",
    dependencies=[needs(Scope.SESSIONS_READ)],
    operation_id="list_links",
    summary="List the session's links, newest first",
    description="The links that have not expired, also revoked ones, without their texts.",
    responses=problems(401, 404),
)
async def list_links(session: SessionId, tenant: Tenant, sharing: Service) -> LinkList:
    found = await sharing.list(tenant, session)
    return LinkList(links=[Link.of(record) for record in found.links])


@links.delete(
    "/{session}/links/{link}",
    dependencies=[needs(Scope.SESSIONS_WRITE)],
    operation_id="revoke_link",
    summary="Revoke a link",
    description="Every gateway refuses the link within two seconds and ends the streams that it has opened. "
    "A repeat gets the same answer.",
    responses=problems(401, 404),
)
async def revoke_link(session: SessionId, link: LinkId, tenant: Tenant, sharing: Service) -> Link:
    return Link.of(await sharing.revoke(tenant, session, link))


router.include_router(links)

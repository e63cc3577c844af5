"""WebRTC: POST, OPTIONS /v1/sessions/{id}/whep and DELETE /v1/sessions/{id}/whep/{peer}.

Source: draft-ietf-wish-whep-02.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.requests import HTTPConnection
from starlette.responses import Response

from turboserve.contracts.keys import Scope
from turboserve.contracts.links import Role
from turboserve.gateway.auth.middleware import StreamCaller, needs
from turboserve.gateway.context import Gateway, gateway_of
from turboserve.gateway.ice_servers import IceServer
from turboserve.gateway.middleware import SDP
from turboserve.gateway.problems.errors import InvalidOfferError
from turboserve.gateway.problems.schemas import BODY, problems
from turboserve.gateway.sessions.parameters import INDEX_LIMIT, SessionId
from turboserve.gateway.whep.peers import Peers, servers_for

router = APIRouter(prefix="/v1/sessions", tags=["video"])

_TEXT: dict[str, Any] = {SDP: {"schema": {"type": "string"}, "example": "v=0\r\n…"}}
_PEER = "peer_01j9x0gq7v5m2k3n4p6r8s9t0a_01j9x0h3c8d2e4f6g7h8j9k0m1"
_LINK = {
    "schema": {"type": "string"},
    "description": 'The STUN and TURN servers for this viewer, each with `rel="ice-server"`.',
}


def _peers_of(connection: HTTPConnection) -> Peers:
    found: Peers = connection.app.state.peers
    return found


GatewayOf = Annotated[Gateway, Depends(gateway_of)]
PeersOf = Annotated[Peers, Depends(_peers_of)]


def _with_links(response: Response, servers: tuple[IceServer, ...]) -> Response:
    for server in servers:
        response.headers.append("Link", server.link)
    response.headers["Cache-Control"] = "no-store"
    return response


@router.post(
    "/{session}/whep",
    dependencies=[needs(Scope.SESSIONS_READ, Role.VIEWER)],
    operation_id="watch_over_webrtc",
    status_code=201,
    summary="Watch over WebRTC (WHEP)",
    description="Answers an SDP offer that receives H.264 video. The video begins at the playhead, and the "
    "gateway paces it. A data channel of the offer carries the JSON messages of the "
    "WebSocket. The gateway sends all its candidates with the answer, and takes no later ones.",
    response_class=Response,
    openapi_extra={"requestBody": {"required": True, "content": _TEXT}},
    responses={
        201: {
            "description": "The SDP answer.",
            "content": _TEXT,
            "headers": {
                "Location": {
                    "schema": {"type": "string"},
                    "description": "Path of this viewer. DELETE ends it.",
                },
                "Link": _LINK,
            },
        },
        **problems(*BODY, 401, 404, 410, 429),
    },
)
async def watch_over_webrtc(
    session: SessionId,
    request: Request,
    caller: StreamCaller,
    gateway: GatewayOf,
    peers: PeersOf,
    events_after: Annotated[
        int | None,
        Query(
            ge=0,
            le=INDEX_LIMIT,
            description="Send the session's events after this `sequence`. Without it: new events only.",
            examples=[4],
        ),
    ] = None,
) -> Response:
    try:
        offer = (await request.body()).decode()
    except UnicodeDecodeError:
        raise InvalidOfferError("the body is not UTF-8", field="body", limit="UTF-8") from None
    path = request.url.path
    name, answer = await peers.open(gateway, caller, session, offer, path, events_after)
    response = Response(answer, 201, {"Location": f"{path}/{name}"}, media_type=SDP)
    return _with_links(response, servers_for(gateway, name))


@router.options(
    "/{session}/whep",
    dependencies=[needs(Scope.SESSIONS_READ, Role.VIEWER)],
    operation_id="get_webrtc_servers",
    status_code=204,
    summary="Read the STUN and TURN servers",
    description="For clients that want to know them before they make an offer.",
    responses={204: {"description": "Only headers.", "headers": {"Link": _LINK}}, **problems(401, 404)},
)
async def webrtc_servers(session: SessionId, caller: StreamCaller, gateway: GatewayOf) -> Response:
    gateway.sessions.check_id(session)
    await gateway.sessions.get_or_remembered(caller.tenant, session)
    response = Response(status_code=204, headers={"Accept-Post": SDP})
    return _with_links(response, servers_for(gateway, session))


@router.delete(
    "/{session}/whep/{peer}",
    dependencies=[needs(Scope.SESSIONS_READ, Role.VIEWER)],
    operation_id="leave_webrtc",
    status_code=204,
    summary="Stop watching over WebRTC",
    description="Ends the connection that the answer to POST named in `Location`. Any gateway takes the "
    "request: the id names the gateway that serves the viewer, and another gateway passes the request on "
    "without waiting. A viewer that just goes is noticed within seconds, too.",
    responses=problems(401, 404),
)
async def leave_webrtc(
    session: SessionId,
    peer: Annotated[str, Path(description="Id of the viewer.", examples=[_PEER])],
    caller: StreamCaller,
    gateway: GatewayOf,
    peers: PeersOf,
) -> Response:
    await peers.leave(gateway, caller.tenant, session, peer)
    return Response(status_code=204)

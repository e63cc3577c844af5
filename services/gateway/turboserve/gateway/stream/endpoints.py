"""Video: WS /v1/sessions/{id}/stream and GET /v1/sessions/{id}/stream.mp4."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from turboserve.contracts.errors import InvalidInputError, TurboServeError
from turboserve.contracts.keys import Scope
from turboserve.contracts.links import Role
from turboserve.gateway.auth.middleware import StreamCaller, admitted, needs
from turboserve.gateway.context import Gateway, gateway_of, owner_of
from turboserve.gateway.events.session_events import known_position
from turboserve.gateway.live_response import LiveResponse
from turboserve.gateway.problems.errors import UpgradeRequiredError
from turboserve.gateway.problems.schemas import problems
from turboserve.gateway.sessions.parameters import SessionId
from turboserve.gateway.stream.mp4 import video
from turboserve.gateway.stream.socket import Connection, refuse
from turboserve.gateway.stream.watch import place_of_viewer

router = APIRouter(prefix="/v1/sessions", tags=["video"])

INDEX_LIMIT = 2**53


@router.get(
    "/{session}/stream.mp4",
    dependencies=[needs(Scope.SESSIONS_READ, Role.VIEWER)],
    operation_id="get_session_video",
    summary="Watch the video as one MP4 file",
    description="One fragmented MP4 that lasts as long as the session, for players of plain HTTP. Such a "
    "player reports no playhead: the gateway assumes that it plays at normal speed. Of a session that has "
    "ended, the file has all video that is kept.",
    response_class=Response,
    responses={
        200: {
            "description": "The init segment, then one fragment per chunk as it is generated.",
            "content": {"video/mp4": {"schema": {"type": "string", "format": "binary"}}},
        },
        **problems(401, 404, 410, 422, 429),
    },
)
async def stream_mp4(
    session: SessionId,
    caller: StreamCaller,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    after: Annotated[
        int | None,
        Query(
            ge=-1,
            le=INDEX_LIMIT,
            description="Begin with the chunk after this index. Without it: at the playhead, or of an ended "
            "session with the oldest chunk that is kept.",
            examples=[41],
        ),
    ] = None,
) -> Response:
    gateway.streams.check(*owner_of(caller))
    record, start = await place_of_viewer(gateway, caller.tenant, session, after)
    return LiveResponse(video(gateway, record, start), gateway.streams, owner_of(caller), "video/mp4")


@router.get(
    "/{session}/stream", dependencies=[needs(Scope.SESSIONS_READ, Role.VIEWER)], include_in_schema=False
)
async def not_a_socket(session: str) -> Response:
    raise UpgradeRequiredError(
        "this is a WebSocket, and the request did not arrive as one: see that proxies pass Upgrade on",
        field="Upgrade",
        limit="websocket",
    )


@router.websocket("/{session}/stream", dependencies=[needs(Scope.SESSIONS_READ, Role.VIEWER)])
async def stream(socket: WebSocket, session: str) -> None:
    """Send the video and the events of the session. See docs/reference/api.md for the messages."""
    gateway = gateway_of(socket)
    await socket.accept()
    try:
        identity = admitted(socket.scope)
        after = _index(socket.query_params.get("after"), "after", -1)
        events = _index(socket.query_params.get("events_after"), "events_after", 0)
        with gateway.streams.place(*owner_of(identity)):
            record, start = await place_of_viewer(gateway, identity.tenant, session, after)
            if events is not None:
                events = await known_position(gateway.bus, record, events)
            await Connection(socket, gateway, identity, record, start, events).run()
    except TurboServeError as error:
        await refuse(socket, error)
    except WebSocketDisconnect:
        return


def _index(text: str | None, name: str, least: int) -> int | None:
    if text is None:
        return None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 16 and int(text) >= least):
        raise InvalidInputError(f"{name}: must be a whole number, {least} or more", field=name, limit=least)
    return int(text)

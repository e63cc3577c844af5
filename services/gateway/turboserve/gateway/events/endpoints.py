"""Session events as server-sent events: GET /v1/sessions/{id}/events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.responses import Response

from turboserve.contracts.keys import Scope
from turboserve.contracts.links import Role
from turboserve.contracts.public_events import public_event
from turboserve.contracts.sessions import SessionRecord
from turboserve.gateway.auth.middleware import StreamCaller, needs
from turboserve.gateway.context import Gateway, gateway_of, owner_of
from turboserve.gateway.events.session_events import follow_events, known_position, newest_event
from turboserve.gateway.live_response import LiveResponse
from turboserve.gateway.problems.schemas import problems
from turboserve.gateway.sessions.parameters import SessionId
from turboserve.tasks import or_silence

router = APIRouter(prefix="/v1/sessions", tags=["events"])

RECONNECT_MS = 1_000
SEQUENCE_LIMIT = 2**53
_EXAMPLE = (
    "id: 4\nevent: prompt.applied\n"
    'data: {"type":"prompt.applied","sequence":4,"id":"ev_0f4c2b9d","at":"2026-11-22T21:04:05.250000Z",'
    '"phase":"active","activity":"watching","epoch":1,"worker":"wk_5f3a9c","control_seq":1,'
    '"prompt_id":"prm_5f3a9c","prompt":"a blue square","chunk_index":5}\n\n'
)


@router.get(
    "/{session}/events",
    dependencies=[needs(Scope.SESSIONS_READ, Role.VIEWER)],
    operation_id="follow_session_events",
    summary="Follow the events of a session",
    description="Server-sent events from the session's beginning on, until it ends. Browsers that reconnect "
    "miss none.",
    response_class=Response,
    responses={
        200: {
            "description": "`id` is the event's `sequence`, `event` its `type`, `data` the event as JSON.",
            "content": {"text/event-stream": {"schema": {"type": "string"}, "example": _EXAMPLE}},
        },
        204: {"description": "The session has ended, and there is no event after Last-Event-ID."},
        **problems(401, 404, 422, 429),
    },
)
async def events(
    session: SessionId,
    caller: StreamCaller,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    after: Annotated[
        int,
        Query(ge=0, le=SEQUENCE_LIMIT, description="Only events with a greater `sequence`.", examples=[4]),
    ] = 0,
    last_event_id: Annotated[
        int | None,
        Header(
            ge=0,
            le=SEQUENCE_LIMIT,
            description="As `after`, which it overrides. Browsers send it when they reconnect.",
            examples=[4],
        ),
    ] = None,
) -> Response:
    gateway.streams.check(*owner_of(caller))
    record = await gateway.sessions.get_or_remembered(caller.tenant, session)
    position = await known_position(gateway.bus, record, after if last_event_id is None else last_event_id)
    last = await _last_event(gateway, record) if record.phase.ended else None
    if last is not None and last <= position:
        return Response(status_code=204)
    # FastAPI's EventSourceResponse can neither answer 204, nor end at a stop of the gateway, nor count the
    # tenant's streams. Its interval of keep-alive comments is fixed.
    lines = _lines(gateway, session, position, last)
    return LiveResponse(lines, gateway.streams, owner_of(caller), EventSourceResponse.media_type)


async def _last_event(gateway: Gateway, ended: SessionRecord) -> int:
    """Return the number of the last event of a session that has ended; 0 if the log has no event of it."""
    newest = await newest_event(gateway.bus, ended.id)
    # The retention may have removed all events from the log. The row's newest event may not be in it yet.
    return max(newest, ended.event_sequence) if newest else 0


async def _lines(
    gateway: Gateway, session: str, position: int, last: int | None
) -> AsyncGenerator[bytes, None]:
    yield format_sse_event(retry=RECONNECT_MS)
    events = follow_events(gateway.bus, session, position, last)
    coming = or_silence(events, gateway.settings.events_keepalive_s)
    async with aclosing(coming):
        async for one in coming:
            if one is None:
                yield KEEPALIVE_COMMENT
                continue
            event = public_event(one)
            yield format_sse_event(data_str=event.text(), event=one.type, id=str(event.sequence))

"""Session events as server-sent events: GET /v1/sessions/{id}/events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.responses import Response

from turboserve.contracts.sessions import SessionRecord
from turboserve.gateway.aio import or_silence
from turboserve.gateway.auth.dependency import StreamTenant
from turboserve.gateway.context import Gateway, gateway_of
from turboserve.gateway.events.follow import follow_events, known_position, newest_event
from turboserve.gateway.problems.schemas import problems
from turboserve.gateway.stream.protocol import EventMessage
from turboserve.gateway.stream.response import LiveResponse

router = APIRouter(prefix="/v1/sessions", tags=["events"])

RECONNECT_MS = 1_000
SEQUENCE_LIMIT = 2**53


@router.get(
    "/{session}/events",
    summary="What happens to the session, from its beginning on",
    response_class=Response,
    responses={
        200: {
            "description": "`id` is the sequence, `event` the type, `data` the event as JSON.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
        204: {"description": "The session has ended and there is nothing after Last-Event-ID."},
        **problems(401, 404, 422, 429),
    },
)
async def events(
    session: str,
    tenant: StreamTenant,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    after: Annotated[int, Query(ge=0, le=SEQUENCE_LIMIT, description="Only events with a greater id.")] = 0,
    last_event_id: Annotated[
        int | None,
        Header(ge=0, le=SEQUENCE_LIMIT, description="As `after`; browsers send it when they reconnect."),
    ] = None,
) -> Response:
    gateway.streams.check(tenant)
    record = await gateway.sessions.get_or_remembered(tenant, session)
    position = await known_position(gateway.bus, record, after if last_event_id is None else last_event_id)
    last = await _last_event(gateway, record) if record.phase.ended else None
    if last is not None and last <= position:
        return Response(status_code=204)
    # FastAPI's EventSourceResponse can neither answer 204, nor end at a stop of the gateway, nor count the
    # tenant's streams. Its interval of keep-alive comments is fixed.
    lines = _lines(gateway, session, position, last)
    return LiveResponse(lines, gateway.streams, tenant, EventSourceResponse.media_type)


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
            event = EventMessage.of(one)
            yield format_sse_event(data_str=event.text(), event=event.type, id=str(event.sequence))

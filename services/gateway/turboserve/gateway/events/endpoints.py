"""Session events as server-sent events: GET /v1/sessions/{id}/events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from pydantic import ValidationError
from starlette.responses import Response

from turboserve.bus import follow
from turboserve.contracts.events import SessionEnded, WorkerJoined, WorkerLeft, event_from_bytes
from turboserve.gateway.aio import or_silence
from turboserve.gateway.auth.dependency import StreamTenant
from turboserve.gateway.context import Gateway, gateway_of
from turboserve.gateway.problems.schemas import problems
from turboserve.gateway.stream.protocol import EventMessage
from turboserve.gateway.stream.response import LiveResponse
from turboserve.gateway.stream.watch import newest_event
from turboserve.subjects import EVENT

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
    gateway.streams.check()
    record = await gateway.sessions.get_or_remembered(tenant, session)
    position = after if last_event_id is None else last_event_id
    if record.phase.ended and await newest_event(gateway, session) <= position:
        return Response(status_code=204)
    return LiveResponse(_lines(gateway, session, position), gateway.streams, "text/event-stream")


async def _lines(gateway: Gateway, session: str, position: int) -> AsyncGenerator[bytes, None]:
    entries = follow(
        gateway.bus, EVENT.stream, EVENT.of(session), EVENT.live(session), after_sequence=position
    )
    yield f"retry: {RECONNECT_MS}\n\n".encode()
    async with aclosing(or_silence(entries, gateway.settings.events_keepalive_s)) as items:
        async for entry in items:
            if entry is None:
                yield b": still here\n\n"
                continue
            try:
                event = event_from_bytes(entry.data)
            except ValidationError:
                continue
            if isinstance(event, WorkerJoined | WorkerLeft):
                continue
            data = EventMessage.of(event, entry.sequence).text()
            yield f"id: {entry.sequence}\nevent: {event.type}\ndata: {data}\n\n".encode()
            if isinstance(event, SessionEnded):
                return

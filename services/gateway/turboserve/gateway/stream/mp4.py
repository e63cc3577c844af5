"""A session's video as one endless MP4 over plain HTTP: GET /v1/sessions/{id}/stream.mp4."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from turboserve import logs
from turboserve.bus.chunk_log import StreamStart
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.keys import Scope
from turboserve.contracts.links import Role
from turboserve.contracts.sessions import SessionRecord
from turboserve.gateway.auth.middleware import StreamCaller, needs
from turboserve.gateway.context import Gateway, gateway_of, owner_of
from turboserve.gateway.live_response import LiveResponse
from turboserve.gateway.problems.schemas import problems
from turboserve.gateway.sessions.parameters import INDEX_LIMIT, SessionId
from turboserve.gateway.stream.watch import Watch, place_of_viewer
from turboserve.tasks import stop

router = APIRouter(prefix="/v1/sessions", tags=["video"])

log = logs.get("stream")


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


async def video(gateway: Gateway, record: SessionRecord, start: StreamStart) -> AsyncGenerator[bytes, None]:
    """Yield the init segment, then one fragment per chunk, until the session ends.

    A player of plain HTTP cannot handle a new init segment or a gap, so the stream ends at either.
    """
    init: bytes | None = None
    async with Watch(gateway, record, start, self_paced=True) as watch:
        events = asyncio.create_task(watch.events())
        try:
            async with aclosing(watch.chunks()) as chunks:
                async for chunk in chunks:
                    if init is None:
                        init = chunk.init
                        yield init
                    if chunk.init != init:
                        log.info("stream ended: the encoder changed", session=record.id)
                        return
                    yield chunk.fragment
                    await watch.sent(chunk, len(chunk.fragment))
        except TurboServeError as error:
            log.info("stream ended early", session=record.id, problem=error.detail)
        finally:
            await stop(events)

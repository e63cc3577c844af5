"""A session's video as one endless MP4 over plain HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from turboserve import logs
from turboserve.bus.chunk_log import StreamStart
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.sessions import SessionRecord
from turboserve.gateway.context import Gateway
from turboserve.gateway.stream.watch import Watch
from turboserve.tasks import stop

log = logs.get("stream")


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

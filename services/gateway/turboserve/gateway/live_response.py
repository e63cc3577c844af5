"""A streaming HTTP response, which ends with its source, its client or the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from turboserve.gateway.context import Streams
from turboserve.tasks import stop


class LiveResponse(Response):
    """Sends each item of `source` as it comes, chunked. A client that does not read delays `source`.

    The response counts in `streams` while it runs. If a limit is reached, it raises as `Streams.check` before
    it sends anything, so that the client gets the problem and not half an answer.
    """

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        streams: Streams,
        sender: tuple[str, str | None],
        media_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`sender`: its tenant, and the id of its key."""
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.body = b""
        self._source = source
        self._streams, self._sender = streams, sender
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._streams.place(*self._sender):
            await self._serve(receive, send)

    async def _serve(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def feed() -> None:
            async with aclosing(self._source):
                async for data in self._source:
                    await send({"type": "http.response.body", "body": data, "more_body": True})

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        feeding = asyncio.create_task(feed())
        others = [asyncio.create_task(gone()), asyncio.create_task(self._stopped())]
        try:
            await asyncio.wait([feeding, *others], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await stop(feeding, *others)
        if others[0].done() and not others[0].cancelled():
            return
        if not feeding.cancelled() and (error := feeding.exception()) is not None:
            if isinstance(error, OSError):
                return
            raise error
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stopped(self) -> None:
        await self._streams.stopping.wait()

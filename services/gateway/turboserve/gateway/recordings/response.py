"""The answer with an item of a recording, or with a range of its bytes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from turboserve import logs
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.recordings import RecordingRecord
from turboserve.gateway.auth.middleware import admitted
from turboserve.gateway.context import Streams, owner_of
from turboserve.gateway.middleware import is_head
from turboserve.gateway.recordings.ranges import is_known, requested
from turboserve.gateway.recordings.service import Recordings

log = logs.get("recordings")


async def item_response(
    request: Request,
    recordings: Recordings,
    record: RecordingRecord,
    streams: Streams,
    item: str,
    part: int = 1,
) -> Response:
    """Answer with `item`, by the request's headers `Range`, `If-Range` and `If-None-Match`."""
    described = await recordings.describe(record, item, part)
    etag = f'"{described.etag}"'
    headers = {
        "ETag": etag,
        "Accept-Ranges": "bytes",
        # Shared caches must not keep it: it belongs to a tenant.
        "Cache-Control": "private, no-cache",
    }
    if is_known(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    wanted = requested(request.headers.get("range"), described.size, request.headers.get("if-range"), etag)
    start, end = (0, described.size) if wanted is None else (wanted.start, wanted.end)
    headers["Content-Type"] = described.media_type
    headers["Content-Length"] = str(end - start)
    if wanted is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{described.size}"
    if item == "video.mp4":
        headers["Content-Disposition"] = f'inline; filename="{record.id}.mp4"'
    if is_head(request.scope):
        return Response(status_code=200 if wanted is None else 206, headers=headers)
    source = recordings.read(record, item, part, start, end, described.etag)
    status = 200 if wanted is None else 206
    return _Body(source, streams, owner_of(admitted(request.scope)), status, headers)


class _Body(Response):
    """Sends the blocks of `source`. It counts as a stream while it runs."""

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        streams: Streams,
        sender: tuple[str, str | None],
        status: int,
        headers: dict[str, str],
    ) -> None:
        super().__init__(status_code=status)
        self.init_headers(headers)
        self._source, self._streams, self._sender = source, streams, sender

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._streams.place(*self._sender):
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            try:
                async with aclosing(self._source):
                    async for data in self._source:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                        if self._streams.stopping.is_set():
                            break
            except TurboServeError as error:
                # The client notices that bytes are missing, and asks for the rest.
                log.info("recording sent in part", path=scope["path"], error=error.detail)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

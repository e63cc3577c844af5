"""Middleware that limits the size of a request's body before other code reads the body."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turboserve.contracts.errors import BodyTooLargeError
from turboserve.gateway.problems.handlers import problem_response

DISCARD_BYTES = 8 << 20
DISCARD_S = 2.0


class BodyLimit:
    """ASGI middleware: reads bodies of at most `limit_bytes`, chunked or not, and answers larger ones 413."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._limit_bytes:
            if b"expect" not in headers:  # A client that sends `Expect` waits with its body.
                await _discard(receive)
            await self._refuse(scope, receive, send)
            return
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > self._limit_bytes:
                if message.get("more_body", False):
                    await _discard(receive)
                await self._refuse(scope, receive, send)
                return
            if not message.get("more_body", False):
                break
        whole: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}

        async def replay() -> Message:
            nonlocal whole
            if whole is None:
                return await receive()
            first, whole = whole, None
            return first

        await self._app(scope, replay, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = BodyTooLargeError(
            f"the body is over {self._limit_bytes} bytes", field="body", limit=self._limit_bytes
        )
        # The body may not have been read to its end, so the connection cannot carry another request.
        await problem_response(error, scope["path"], {"Connection": "close"})(scope, receive, send)


async def _discard(receive: Receive) -> None:
    """Read and discard more of the body, at most `DISCARD_BYTES` and for at most `DISCARD_S`.

    Closing a connection with unread bytes resets it, and the client loses the answer.
    """
    seen = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while seen < DISCARD_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                seen += len(message.get("body", b""))

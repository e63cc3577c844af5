"""Ends a stream when the key or link that opened it is revoked or expires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from turboserve.contracts.errors import UnauthorizedError
from turboserve.gateway.auth.access import Identity
from turboserve.gateway.problems.handlers import problem_response

REVOKED_CODE = 4401
CLOSE_S = 1.0
ENDED = "the API key or link was revoked or has expired"
_CLOSE = {"type": "websocket.close", "code": REVOKED_CODE, "reason": ENDED}


class RevocableStream:
    """The channel of a stream. When its key or link ends, the application gets a disconnect and cannot send.

    Once the application has returned, the client gets the end of the body, or the close code 4401.
    """

    def __init__(
        self,
        holds: Callable[[Identity], bool],
        identity: Identity,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """`holds`: whether the key or link of an identity is still valid."""
        self._holds, self._identity = holds, identity
        self._scope, self._receive, self._send = scope, receive, send
        self._websocket = scope["type"] == "websocket"
        self._waiting: asyncio.Timeout | None = None
        self._revoked = False
        self._begun, self._over = False, False
        """Whether the response or handshake was answered. Whether the client has left, or has everything."""

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope, self._next, self._pass)
        except (OSError, WebSocketDisconnect):
            if not self._revoked:
                raise
        if self._revoked and not self._over:
            # uvicorn raises RuntimeError for a close after the other side's.
            with suppress(OSError, RuntimeError):
                await self._close()

    def check(self) -> bool:
        """Return whether the key or link is still valid. If not, end the stream."""
        if not self._revoked and not self._holds(self._identity):
            self._revoked = True
            if self._waiting is not None:
                self._waiting.reschedule(asyncio.get_running_loop().time())
        return not self._revoked

    async def _next(self) -> Message:
        if not self._begun or self.check():
            try:
                async with asyncio.timeout(None) as self._waiting:
                    try:
                        message = await self._receive()
                    finally:
                        self._waiting = None
                self._over |= message["type"] in ("http.disconnect", "websocket.disconnect")
                if self.check() or not self._begun:
                    return message
            except TimeoutError:
                if not self._revoked:
                    raise
        return _CLOSE | {"type": "websocket.disconnect"} if self._websocket else {"type": "http.disconnect"}

    async def _pass(self, message: Message) -> None:
        # Browsers do not show a refused handshake, so it is accepted and then closed.
        if message["type"] != "websocket.accept" and not self.check():
            raise WebSocketDisconnect(REVOKED_CODE, ENDED) if self._websocket else OSError(ENDED)
        self._begun = True
        if message["type"] in ("websocket.close", "http.response.body"):
            self._over = not message.get("more_body", False)
        await self._send(message)

    async def _close(self) -> None:
        if self._websocket:
            async with asyncio.timeout(CLOSE_S):
                await self._send({**_CLOSE})
        elif self._begun:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            error = UnauthorizedError(ENDED, field="Authorization")
            await problem_response(error, self._scope["path"])(self._scope, self._receive, self._send)

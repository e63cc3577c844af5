"""The end of a stream whose key is revoked, as the application and the client see it."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from tests.helpers.virtual_clock import VirtualClock
from turboserve.gateway.auth.access import Keys
from turboserve.gateway.auth.hashing import KeySet, StoredKey
from turboserve.gateway.auth.middleware import Authenticate, Authenticator
from turboserve.gateway.auth.signing import GrantSigner

KEY = "secret-1-0123456789"
VIDEO, EVENTS, SOCKET = (f"/v1/sessions/ses_1/{name}" for name in ("stream.mp4", "events", "stream"))
START: Message = {"type": "http.response.start", "status": 200, "headers": []}
PART: Message = {"type": "http.response.body", "body": b"video", "more_body": True}
END: Message = {"type": "http.response.body", "body": b"", "more_body": False}


class Client:
    """Sends one request with a key, and nothing after it. Collects what it gets."""

    def __init__(self, kind: str, path: str) -> None:
        self.keys = Keys(self._one_key(), clock=VirtualClock())
        headers = [(b"authorization", f"Bearer {KEY}".encode())]
        self.scope: Scope = {"type": kind, "path": path, "headers": headers, "client": ("127.0.0.1", 1)}
        first = "websocket.connect" if kind == "websocket" else "http.request"
        self._first: list[Message] = [{"type": first}]
        self.got: list[Message] = []

    @staticmethod
    def _one_key() -> KeySet:
        empty = KeySet()
        return KeySet(salt=empty.salt, keys=(StoredKey(id="k1", tenant="acme", hash=empty.hash_of(KEY)),))

    async def _receive(self) -> Message:
        if self._first:
            return self._first.pop()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def _send(self, message: Message) -> None:
        self.got.append(message)

    def revoke(self) -> None:
        self.keys.replace(KeySet())

    async def serve(self, app: ASGIApp) -> None:
        """Let `app` answer. Returns when it has, although the client never disconnects."""
        authenticator = Authenticator(self.keys, GrantSigner(object(), VirtualClock()), VirtualClock(), 30)  # type: ignore[arg-type]
        async with asyncio.timeout(60.0):
            await Authenticate(app, authenticator, self.keys)(self.scope, self._receive, self._send)


async def test_a_silent_body_ends() -> None:
    client, seen = Client("http", VIDEO), []

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        await send(PART)
        client.revoke()
        seen.append(await receive())

    await client.serve(app)
    assert seen == [{"type": "http.disconnect"}]
    assert client.got == [START, PART, END]


async def test_a_silent_websocket_is_closed() -> None:
    client, seen = Client("websocket", SOCKET), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        await socket.accept()
        client.revoke()
        seen.append(await socket.receive())

    await client.serve(app)
    assert [(one["type"], one["code"]) for one in seen] == [("websocket.disconnect", 4401)]
    assert [one["type"] for one in client.got] == ["websocket.accept", "websocket.close"]
    assert client.got[-1]["code"] == 4401


async def test_a_key_that_ends_during_the_handshake_closes_the_accepted_socket() -> None:
    client = Client("websocket", SOCKET)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        client.revoke()
        await socket.accept()
        await socket.send_text("hello")

    await client.serve(app)
    assert [one["type"] for one in client.got] == ["websocket.accept", "websocket.close"]
    assert client.got[-1]["code"] == 4401


async def test_a_send_fails_and_what_was_sent_is_completed() -> None:
    client, failed = Client("http", EVENTS), []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send(START)
        client.revoke()
        try:
            await send(PART)
        except OSError as error:
            failed.append(error)
            raise

    await client.serve(app)
    assert len(failed) == 1
    assert client.got == [START, END]


async def test_before_the_response_began_the_answer_is_401() -> None:
    client = Client("http", VIDEO)

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        client.revoke()
        await send(START)

    await client.serve(app)
    start, body = client.got
    assert (start["type"], start["status"]) == ("http.response.start", 401)
    found: dict[str, Any] = json.loads(body["body"])
    assert (found["code"], found["field"], found["instance"]) == ("unauthorized", "Authorization", VIDEO)
    assert not body.get("more_body", False)


async def test_a_stream_that_has_ended_gets_nothing_more() -> None:
    client = Client("http", VIDEO)

    async def whole(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send(START)
        await send(END)
        client.revoke()

    await client.serve(whole)
    assert client.got == [START, END]
    client = Client("websocket", SOCKET)

    async def closed(scope: Scope, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        await socket.accept()
        await socket.close(1000)
        client.revoke()
        await socket.send_text("too late")

    # Starlette's own error for a send after a close.
    with suppress(RuntimeError, WebSocketDisconnect):
        await client.serve(closed)
    assert [one["type"] for one in client.got] == ["websocket.accept", "websocket.close"]
    assert client.got[-1]["code"] == 1000

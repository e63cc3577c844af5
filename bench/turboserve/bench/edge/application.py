"""The smallest ASGI application that uses a connection as the gateway does: it delivers chunks.

- `/stream`: a WebSocket with a text message and then a binary message per chunk.
- `/stream.mp4`: a chunked answer.
- `POST /body`: answers with the length of the body.
- `/client`: answers with the client's address and the scheme.
- Any other path: a short answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

FRAGMENT_BYTES = 100_000


async def application(scope: Message, receive: Receive, send: Send) -> None:
    """Serve one request. `?interval_s=` is the time between two chunks; 0: as fast as the client reads."""
    if scope["type"] == "lifespan":
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    query = parse_qs(scope["query_string"].decode())
    interval_s = float(query.get("interval_s", ["0.75"])[0])
    if scope["type"] == "websocket":
        await _socket(receive, send, interval_s)
    elif scope["path"] == "/stream.mp4":
        await _start(send, "video/mp4")
        await _until_gone(receive, _video(send, interval_s))
    elif scope["method"] == "POST":
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        await _answer(send, b'{"bytes":%d}' % size)
    elif scope["path"] == "/client":
        await _answer(send, json.dumps({"client": scope["client"][0], "scheme": scope["scheme"]}).encode())
    else:
        await _answer(send, b'{"status":"ok"}')


async def _socket(receive: Receive, send: Send, interval_s: float) -> None:
    await receive()
    await send({"type": "websocket.accept"})

    async def chunks() -> None:
        fragment = bytes(FRAGMENT_BYTES)
        while True:
            await send({"type": "websocket.send", "text": f'{{"published_at":{time.time()!r}}}'})
            await send({"type": "websocket.send", "bytes": fragment})
            await asyncio.sleep(interval_s)

    await _until_gone(receive, chunks())


async def _video(send: Send, interval_s: float) -> None:
    fragment = bytes(FRAGMENT_BYTES)
    while True:
        await send({"type": "http.response.body", "body": fragment, "more_body": True})
        await asyncio.sleep(interval_s)


async def _until_gone(receive: Receive, work: Any) -> None:
    """Run `work` until the client disconnects."""

    async def gone() -> None:
        while not (await receive())["type"].endswith("disconnect"):
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _start(send: Send, kind: str, length: int | None = None) -> None:
    headers = [(b"content-type", kind.encode())]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _answer(send: Send, body: bytes) -> None:
    await _start(send, "application/json", len(body))
    await send({"type": "http.response.body", "body": body, "more_body": False})

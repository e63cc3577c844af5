"""A receiver of webhooks whose answers the test decides."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Received:
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes
    at: float

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def message(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


@dataclass(frozen=True)
class Reply:
    """An answer. `after`: an event that it waits for."""

    status: int = 204
    headers: str = ""
    body: bytes = b""
    after: asyncio.Event | None = None


@dataclass
class Receiver:
    """An HTTP server on the loopback interface."""

    port: int = 0
    got: list[Received] = field(default_factory=list)
    reply: Callable[[Received], Reply] = lambda _received: Reply()

    def url(self, path: str = "/", host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    def ids(self, path: str = "/") -> list[str]:
        return [one.id for one in self.got if one.path == path]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                one = Received(head[0].split()[1], headers, body, time.time())
                self.got.append(one)
                reply = self.reply(one)
                if reply.after is not None:
                    await reply.after.wait()
                answer = (
                    f"HTTP/1.1 {reply.status} x\r\ncontent-length: {len(reply.body)}\r\n{reply.headers}\r\n"
                )
                writer.write(answer.encode() + reply.body)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def receiving(ssl: Any = None) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0, ssl=ssl)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()

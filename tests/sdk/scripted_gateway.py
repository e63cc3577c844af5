"""A gateway whose answers a test writes: a real HTTP and WebSocket server on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from websockets.asyncio.server import ServerConnection, serve

from turboserve.client import (
    AsyncClient,
    VideoStream,
)

Script = Callable[["Connection"], Awaitable[None]]


@dataclass
class Connection:
    """One WebSocket connection of a client."""

    socket: ServerConnection
    query: dict[str, str]
    messages: list[dict[str, Any]] = field(default_factory=list)
    """What the client has sent."""

    async def hello(self, start: int = 0, **more: Any) -> None:
        greeting: dict[str, Any] = {
            "type": "hello",
            "protocol_version": 1,
            "session": "ses_1",
            "phase": "active",
            "activity": "watching",
            "prompt": "a red circle",
            "model": "toyworld",
            "seed": 7,
            "epoch": 1,
            "control_seq": 0,
            "applied_control_seq": 0,
            "next": start,
            "start_s": float(start),
            "events_after": 0,
            "newest_event": 0,
            "max_message_bytes": 65536,
            "report_interval_s": 0.02,
        }
        await self.send(**greeting | more)

    async def init(self, data: bytes = b"init") -> None:
        await self.send(type="init", mime="video/mp4", width=64, height=64, fps=16.0, bytes=len(data))
        await self.socket.send(data)

    async def chunk(self, index: int) -> None:
        data = f"fragment {index}".encode()
        await self.send(
            type="chunk",
            index=index,
            epoch=1,
            worker="wk_1",
            start_s=float(index),
            duration_s=1.0,
            control_seq=0,
            compute_s=0.1,
            published_at="2026-11-22T21:04:05.250000Z",
            bytes=len(data),
        )
        await self.socket.send(data)

    async def begin(self, chunks: Iterable[int] = (), *, start: int = 0, init: bytes = b"init") -> None:
        """Greet the client, then send the init segment and these chunks. `start`: the first index."""
        await self.hello(start)
        await self.init(init)
        for index in chunks:
            await self.chunk(index)

    async def event(self, sequence: int, kind: str = "session.placed", **more: Any) -> None:
        event: dict[str, Any] = {
            "type": kind,
            "sequence": sequence,
            "id": f"ev_{sequence}",
            "at": "2026-11-22T21:04:05.250000Z",
            "phase": "active",
            "activity": "watching",
            "epoch": 1,
            "control_seq": 0,
            "kind": "place",
        }
        await self.send(**event | more)

    async def skip(self, index: int, control_seq: int = 1) -> None:
        await self.send(type="skip", index=index, start_s=float(index), control_seq=control_seq)

    async def refuse(self, close_code: int, **problem: Any) -> None:
        await self.send(type="error", **problem)
        await self.socket.close(close_code)

    async def end(self, last: int) -> None:
        await self.send(type="end", phase="terminated", reason="ended by its user", last=last)
        await self.socket.close(1000)

    async def send(self, **message: Any) -> None:
        await self.socket.send(json.dumps(message))

    async def reading(self) -> None:
        """Keep what the client sends until it leaves."""
        async for raw in self.socket:
            self.messages.append(json.loads(raw))

    async def vanish(self) -> None:
        """End the connection without a close code, as a crash does."""
        self.socket.transport.abort()
        await self.socket.wait_closed()


def plays(chunks: Iterable[int], *, start: int = 0, init: bytes = b"init", ends: bool = True) -> Script:
    """A connection that gets these chunks. Then the session ends; or, without `ends`, the client leaves."""
    sent = list(chunks)

    async def play(connection: Connection) -> None:
        await connection.begin(sent, start=start, init=init)
        if ends:
            await connection.end(sent[-1])
        else:
            await connection.socket.wait_closed()

    return play


@dataclass
class ScriptedGateway:
    """The address of the gateway, and its connections so far."""

    url: str = ""
    connections: list[Connection] = field(default_factory=list)


@asynccontextmanager
async def scripted(*scripts: Script, process_request: Any = None) -> AsyncIterator[ScriptedGateway]:
    """Serve each connection by the next script. Further connections are answered by the last one.

    `process_request`: see `websockets.asyncio.server.serve`.
    """
    gateway = ScriptedGateway()

    async def handle(socket: ServerConnection) -> None:
        assert socket.request is not None
        query = {name: value[0] for name, value in parse_qs(urlsplit(socket.request.path).query).items()}
        connection = Connection(socket, query)
        gateway.connections.append(connection)
        reading = asyncio.create_task(connection.reading())
        try:
            await scripts[min(len(gateway.connections), len(scripts)) - 1](connection)
        finally:
            reading.cancel()

    async with serve(handle, "127.0.0.1", 0, process_request=process_request) as server:
        port = server.sockets[0].getsockname()[1]
        gateway.url = f"http://127.0.0.1:{port}"
        yield gateway


def watch(gateway: ScriptedGateway, **options: Any) -> VideoStream:
    return AsyncClient(gateway.url, key="secret").session("ses_1").watch(**options)


async def chunks(stream: VideoStream) -> list[int]:
    async with stream:
        return [chunk.index async for chunk in stream]

"""Idle connections: clients close them first, they keep no client out, and no slow head looks like one.

Incident: the gateway closed idle connections after 5 s, as httpx does. Clients that sent a request every 3 to
5 s saw ReadError.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
from fastapi import FastAPI, WebSocket

from tests.helpers.waiting import eventually
from turboserve.gateway.server import Server
from turboserve.gateway.serving.guard import Guard, Overdue, Stage
from turboserve.gateway.serving.protocols import GuardedHttp
from turboserve.gateway.serving.settings import ServerSettings

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
HANDSHAKE = (
    b"GET /socket HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
PATIENT = ServerSettings(header_timeout_s=3600.0, connections_exempt=(), connections_per_address=2)
"""No connection ends because this machine is slow."""
CLIENTS_S = {"httpx": httpx.Limits().keepalive_expiry, "aiohttp": 15.0, "nginx": 60.0}
"""How long clients keep an idle connection by default."""


def test_clients_give_up_idle_connections_before_the_gateway_closes_them() -> None:
    kept_s = ServerSettings().keep_alive_s
    assert all(limit_s is not None and limit_s + 5.0 < kept_s for limit_s in CLIENTS_S.values())


def guards_of(server: Server) -> list[Guard]:
    """The guards of the server's HTTP connections."""
    connections = server.server_state.connections
    return [connection.guard for connection in connections if isinstance(connection, GuardedHttp)]


def guard_of(server: Server) -> Guard:
    """The guard of the server's one connection."""
    [guard] = guards_of(server)
    return guard


@asynccontextmanager
async def serving(app: FastAPI | None = None) -> AsyncIterator[Server]:
    """Serve an application, by default one without routes."""
    server = Server(app or FastAPI(), "127.0.0.1", 0, PATIENT)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@dataclass(frozen=True)
class Peer:
    """A client's connection, and the server's guard of it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    guard: Guard

    async def waits_for(self, stage: Stage) -> None:
        """Wait until the server waits for this."""
        await eventually(lambda: self.guard.stage is stage)


@asynccontextmanager
async def idle_peer(server: Server) -> AsyncIterator[Peer]:
    """The server's one connection, which is idle after an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(REQUEST)
    await reader.readuntil(b"}")
    peer = Peer(reader, writer, guard_of(server))
    await peer.waits_for(Stage.IDLE)
    try:
        yield peer
    finally:
        writer.close()


async def test_the_time_for_a_head_begins_with_its_first_byte() -> None:
    async with serving() as server, idle_peer(server) as peer:
        peer.writer.write(REQUEST[:10])
        await peer.waits_for(Stage.HEAD)
        peer.writer.write(REQUEST[10:])
        await peer.reader.readuntil(b"}")
        await peer.waits_for(Stage.IDLE)
        # Two requests at once.
        peer.writer.write(REQUEST + REQUEST[:10])
        await peer.reader.readuntil(b"}")
        await peer.waits_for(Stage.HEAD)


async def test_a_slow_head_after_an_answer_is_answered_like_a_first_one() -> None:
    async with serving() as server, idle_peer(server) as peer:
        guard = peer.guard
        peer.writer.write(REQUEST[:10])
        await peer.waits_for(Stage.HEAD)
        # As when the time for the head is over.
        assert guard.timed_out is not None
        assert guard.transport is not None
        guard.timed_out(Overdue.HEAD)
        guard.transport.close()
        answer = await peer.reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in answer


async def test_the_first_head_has_its_time_from_the_start() -> None:
    async with serving() as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await eventually(lambda: bool(server.server_state.connections))
        assert guard_of(server).stage is Stage.HEAD
        writer.close()


async def test_the_time_for_a_handshake_begins_with_it() -> None:
    app, asked, accepts = FastAPI(), asyncio.Event(), asyncio.Event()

    @app.websocket("/socket")
    async def serve(socket: WebSocket) -> None:
        asked.set()
        await accepts.wait()
        await socket.accept()
        await socket.receive()

    async with serving(app) as server, idle_peer(server) as peer:
        peer.writer.write(HANDSHAKE)
        await asked.wait()
        assert peer.guard.stage is Stage.HEAD
        accepts.set()
        assert b" 101 " in await peer.reader.readuntil(b"\r\n\r\n")
        await peer.waits_for(Stage.ANSWER)


async def test_idle_connections_keep_no_client_of_their_address_out() -> None:
    async with serving() as server:

        async def answered() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(REQUEST)
            assert b" 404 " in await reader.readuntil(b"}")
            await eventually(lambda: all(one.stage is not Stage.ANSWER for one in guards_of(server)))
            return reader, writer

        first, second = await answered(), await answered()
        third = await answered()
        # The first one was idle longest.
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await first[0].readexactly(1)
        second[1].write(REQUEST)
        assert b" 404 " in await second[0].readuntil(b"}")
        for _, writer in (first, second, third):
            writer.close()

"""Idle connections: clients close them first, and a slow head does not hide as an idle connection.

Incident: the gateway closed idle connections after 5 s, as httpx does. Clients that sent a request every 3 to
5 s saw ReadError.
"""

from __future__ import annotations

import asyncio

import httpx
from fastapi import FastAPI

from tests.helpers.waiting import eventually
from turboserve.gateway.server import Server
from turboserve.gateway.serving.guard import Guard, Stage
from turboserve.gateway.serving.protocols import GuardedHttp
from turboserve.gateway.serving.settings import ServerSettings

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
CLIENTS_S = {"httpx": httpx.Limits().keepalive_expiry, "aiohttp": 15.0, "nginx": 60.0}
"""How long clients keep an idle connection by default."""


def test_clients_give_up_idle_connections_before_the_gateway_closes_them() -> None:
    kept_s = ServerSettings().keep_alive_s
    assert all(limit_s is not None and limit_s + 5.0 < kept_s for limit_s in CLIENTS_S.values())


def guard_of(server: Server) -> Guard:
    """The guard of the server's one connection."""
    [connection] = server.server_state.connections
    assert isinstance(connection, GuardedHttp)
    return connection.guard


async def test_the_time_for_a_head_begins_with_its_first_byte() -> None:
    server = Server(FastAPI(), "127.0.0.1", 0)
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(REQUEST)
        await reader.readuntil(b"}")
        guard = guard_of(server)

        async def waits_for(stage: Stage) -> None:
            await eventually(lambda: guard.stage is stage)

        await waits_for(Stage.IDLE)
        writer.write(REQUEST[:10])
        await waits_for(Stage.HEAD)
        writer.write(REQUEST[10:])
        await reader.readuntil(b"}")
        await waits_for(Stage.IDLE)
        # Two requests at once.
        writer.write(REQUEST + REQUEST[:10])
        await reader.readuntil(b"}")
        await waits_for(Stage.HEAD)
        writer.close()
    finally:
        await server.stop()


async def test_the_first_head_has_its_time_from_the_start() -> None:
    server = Server(FastAPI(), "127.0.0.1", 0)
    await server.start()
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await eventually(lambda: bool(server.server_state.connections))
        assert guard_of(server).stage is Stage.HEAD
        writer.close()
    finally:
        await server.stop()

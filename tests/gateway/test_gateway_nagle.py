"""A chunk's two WebSocket messages are not delayed by Nagle's algorithm.

With it, the second message waited for the delayed acknowledgement of the first: 40 ms in every twentieth
chunk, as `turboserve bench stream` showed.
"""

from __future__ import annotations

import asyncio
import socket

from fastapi import FastAPI

from turboserve.gateway.server import Server


async def test_connections_send_at_once() -> None:
    server = Server(FastAPI(), "127.0.0.1", 0)
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readline()
        [connection] = server.server_state.connections
        own = connection.transport.get_extra_info("socket")
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        writer.close()
    finally:
        await server.stop()

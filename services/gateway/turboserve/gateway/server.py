"""Runs uvicorn with limits and deadlines for connections. The service runner handles the signals."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from turboserve import logs
from turboserve.connections import (
    ConnectionLimits,
    ConnectionTable,
    free_descriptors,
    raise_descriptor_limit,
)
from turboserve.gateway.serving.acceptor import Acceptor
from turboserve.gateway.serving.connection import Deadlines
from turboserve.gateway.serving.guard import RequestLimits
from turboserve.gateway.serving.http import GuardedHttp
from turboserve.gateway.serving.settings import ServerSettings, as_text

log = logs.get("http")

SOCKET_MESSAGE_BYTES = 1 << 20
"""A larger message closes a WebSocket with 1009. The gateway's own, far lower limit answers an error."""
GRACE_S = 2
BACKLOG = 128
LEAST_CONNECTIONS = 16
"""Minimum number of connections. The server does not start if the process may open fewer."""


class Server(uvicorn.Server):
    """Serves `app` on `host:port` between `start` and `stop`."""

    def __init__(self, app: FastAPI, host: str, port: int, settings: ServerSettings | None = None) -> None:
        """`settings`: None means the defaults."""
        self._settings = settings = settings or ServerSettings()
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                # Both logs would show URLs, which may contain an access token.
                access_log=False,
                log_level="warning",
                server_header=False,
                lifespan="off",
                http=GuardedHttp,
                ws="websockets-sansio",
                ws_max_size=SOCKET_MESSAGE_BYTES,
                ws_per_message_deflate=False,  # Video does not compress.
                timeout_keep_alive=settings.keep_alive_s,  # type: ignore[arg-type]
                timeout_graceful_shutdown=GRACE_S,
                proxy_headers=bool(settings.trusted_proxies),
                forwarded_allow_ips=as_text(settings.trusted_proxies),
            )
        )
        self._host, self._port = host, port
        self._serving: asyncio.Task[None] | None = None
        self._acceptor: Acceptor | None = None
        self.port = port
        """Port that the server listens on. `start` replaces 0 by the assigned port."""

    async def start(self) -> None:
        """Bind the address and accept connections.

        Raises OSError if the address is taken or the process may open too few descriptors.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # The socket names TCP explicitly, and connections inherit that: asyncio turns Nagle's algorithm off
        # only for such sockets. With Nagle's algorithm, the second message of a chunk waits up to 40 ms for
        # the acknowledgement of the first.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self._host, self._port))
        except OSError as error:
            listening.close()
            raise OSError(error.errno, f"{self._host}:{self._port}: {error.strerror}") from None
        self.port = int(listening.getsockname()[1])
        self._serving = asyncio.create_task(self.serve(sockets=[listening]), name="http")
        while not self.started and not self._serving.done():
            await asyncio.sleep(0.01)
        if self._serving.done():
            self._serving.result()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the acceptor. Replaces uvicorn's method, which accepts every connection."""
        assert sockets is not None
        [listening] = sockets
        listening.setblocking(False)
        listening.listen(BACKLOG)
        settings = self._settings
        table = ConnectionTable(
            ConnectionLimits(
                self._connection_limit(),
                settings.connections_per_address,
                (*settings.connections_exempt, *settings.trusted_proxies),
            )
        )
        limits = RequestLimits(
            settings.header_limit_bytes,
            settings.header_limit_count,
            settings.frame_rate_limit,
            Deadlines(settings.header_timeout_s, settings.body_timeout_s, settings.write_timeout_s),
        )
        self.servers = []
        self._acceptor = Acceptor(
            listening,
            table,
            limits,
            lambda guard: GuardedHttp(self.config, self.server_state, {}, guard=guard),
        )
        self._acceptor.start()
        self.started = True

    def _connection_limit(self) -> int:
        raise_descriptor_limit()
        settings = self._settings
        room = free_descriptors() - settings.descriptor_reserve
        if room < LEAST_CONNECTIONS:
            raise OSError(
                f"this process may open {room + settings.descriptor_reserve} more files, of which "
                f"{settings.descriptor_reserve} are reserved: raise its limit (ulimit -n)"
            )
        if room < settings.connection_limit:
            log.warning(
                "fewer connections than configured", limit=room, connection_limit=settings.connection_limit
            )
        return min(settings.connection_limit, room)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            await self._acceptor.stop()
        await super().shutdown(sockets)

    async def wait(self) -> None:
        """Wait until the server stops, for any reason."""
        if self._serving is not None:
            await asyncio.shield(self._serving)

    async def stop(self) -> None:
        self.should_exit = True
        await self.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

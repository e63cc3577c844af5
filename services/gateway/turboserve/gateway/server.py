"""Runs uvicorn with limits and deadlines for connections. The service runner handles the signals."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from fastapi import FastAPI

from turboserve import logs
from turboserve.clock import until_multiple
from turboserve.connections import (
    ConnectionLimits,
    ConnectionRefusal,
    ConnectionTable,
    free_descriptors,
    raise_descriptor_limit,
)
from turboserve.gateway import metrics
from turboserve.gateway.problems.errors import TooManyConnectionsError, TooManyOfAddressError
from turboserve.gateway.problems.handlers import problem_response
from turboserve.gateway.serving.guard import READ_BYTES, Deadlines, Guard, Overdue, RequestLimits
from turboserve.gateway.serving.protocols import GuardedHttp, raw
from turboserve.gateway.serving.settings import ServerSettings, as_text
from turboserve.host_port import host_port
from turboserve.telemetry_names import REASON

log = logs.get("http")

SWEEP_S = 0.5
LOG_S = 5.0
"""Minimum interval between log lines with the numbers of refused and closed connections, seconds."""
RETRY_S = 5.0
SYSTEM_PAUSE_S = 0.5
"""Pause after the system had no resources for a connection, seconds."""
SOCKET_MESSAGE_BYTES = 1 << 20
"""A larger message closes a WebSocket with 1009. The gateway's own, far lower limit answers an error."""
GRACE_S = 2
BACKLOG = 128
LEAST_CONNECTIONS = 16
"""Minimum number of connections. The server does not start if the process may open fewer."""


class Acceptor:
    """Serves one listening socket between `start` and `stop`."""

    def __init__(
        self,
        listening: socket.socket,
        table: ConnectionTable,
        limits: RequestLimits,
        protocol: Callable[[Guard], asyncio.Protocol],
    ) -> None:
        self._listening, self._table, self._limits, self._protocol = listening, table, limits, protocol
        self._guards: dict[int, Guard] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._refused: Counter[ConnectionRefusal] = Counter()
        self._cut: Counter[Overdue] = Counter()
        self._evicted = 0
        refusals = (
            (
                ConnectionRefusal.TOTAL,
                TooManyConnectionsError("this gateway has reached its connection limit"),
            ),
            (
                ConnectionRefusal.ADDRESS,
                TooManyOfAddressError("this address has reached its connection limit"),
            ),
        )
        self._answers: dict[ConnectionRefusal, bytes] = {}
        for refusal, error in refusals:
            error.retry_after_s = RETRY_S
            self._answers[refusal] = raw(problem_response(error, "", {"Connection": "close"}))

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._accept(), name="accept"), asyncio.create_task(self._sweep())]

    async def stop(self) -> None:
        """Stop accepting connections. Open connections stay open, without deadlines."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                # One connection at a time: a burst would use the reserved descriptors before it is refused.
                connection, peer = await loop.sock_accept(self._listening)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                log.error("no connection can be accepted", error=str(error))
                await asyncio.sleep(SYSTEM_PAUSE_S)
                continue
            admission = self._table.admit(str(peer[0]))
            if admission.evicted is not None:
                self._evicted += 1
                if (evicted := self._guards.get(admission.evicted)) is not None:
                    evicted.evict()
            if admission.refusal is not None:
                self._refuse(connection, admission.refusal)
            elif admission.key is not None:
                await self._serve(admission.key, connection)

    async def _serve(self, key: int, connection: socket.socket) -> None:
        guard = Guard(key, self._table, self._limits, self._forget)
        self._guards[key] = guard
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._protocol(guard), connection
            )
        except OSError:
            connection.close()
            guard.lost()

    def _forget(self, key: int) -> None:
        self._guards.pop(key, None)

    def _refuse(self, connection: socket.socket, refusal: ConnectionRefusal) -> None:
        self._refused[refusal] += 1
        metrics.connections_refused.add(1, {REASON: refusal.value})
        with connection, suppress(OSError):
            connection.setblocking(False)
            connection.send(self._answers[refusal])
            connection.shutdown(socket.SHUT_WR)
            # Closing with unread bytes resets the connection, and the client may lose the answer.
            connection.recv(READ_BYTES)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        logged_at = loop.time()
        while True:
            await asyncio.sleep(until_multiple(SWEEP_S, loop.time()))
            for guard in list(self._guards.values()):
                if (reason := guard.sweep()) is not None:
                    self._cut[reason] += 1
                    metrics.connections_cut.add(1, {REASON: reason.value})
            if loop.time() - logged_at >= LOG_S:
                logged_at = loop.time()
                self._log()

    def _log(self) -> None:
        if self._refused or self._evicted:
            log.warning(
                "connections refused",
                open=len(self._table),
                evicted=self._evicted,
                **{f"refused_{reason.value}": count for reason, count in self._refused.items()},
            )
        if self._cut:
            log.info(
                "connections cut", **{f"overdue_{reason.value}": count for reason, count in self._cut.items()}
            )
        self._refused.clear()
        self._cut.clear()
        self._evicted = 0


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
            raise OSError(error.errno, f"{host_port(self._host, self._port)}: {error.strerror}") from None
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
            Deadlines(
                settings.header_timeout_s,
                settings.body_timeout_s,
                settings.write_timeout_s,
                settings.keep_alive_s,
            ),
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

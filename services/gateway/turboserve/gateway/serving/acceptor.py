"""Accepts connections one by one up to the limits, and closes overdue connections."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from turboserve import logs
from turboserve.connections import ConnectionRefusal, ConnectionTable
from turboserve.gateway import metrics
from turboserve.gateway.problems.errors import TooManyConnectionsError, TooManyOfAddressError
from turboserve.gateway.problems.handlers import problem_response
from turboserve.gateway.serving.connection import Overdue
from turboserve.gateway.serving.guard import READ_BYTES, Guard, RequestLimits
from turboserve.gateway.serving.http import raw

log = logs.get("http")

SWEEP_S = 0.5
LOG_S = 5.0
"""Minimum interval between log lines with the numbers of refused and closed connections, seconds."""
RETRY_S = 5.0
SYSTEM_PAUSE_S = 0.5
"""Pause after the system had no resources for a connection, seconds."""


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
        metrics.connections_refused.add(1, {"reason": refusal.value})
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
            await asyncio.sleep(SWEEP_S)
            for guard in list(self._guards.values()):
                if (reason := guard.sweep()) is not None:
                    self._cut[reason] += 1
                    metrics.connections_cut.add(1, {"reason": reason.value})
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

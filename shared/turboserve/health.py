"""A small HTTP server in every service: /healthz, /readyz, /metrics. The supervisor and probes read it.

Starlette on uvicorn does not replace it. uvicorn does not limit the time for a request's headers, and its
limit on connections refuses the newest one, so that 16 half-open connections would stop every probe. It would
also add 0.2 s and 4 MiB to the start of each process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress

from turboserve import telemetry
from turboserve.connections import ConnectionLimits, ConnectionTable

Check = Callable[[], dict[str, bool]]
"""Returns named conditions. The service is ready when all of them hold."""

CONNECTIONS = 16
"""Maximum of open connections. A new one replaces the one that has waited longest, so that probes succeed."""
BACKLOG = 8
"""Maximum of connections that the event loop accepts at once, before the limit applies."""
HEADER_BYTES = 8_192
"""Maximum size of a request's headers, bytes. The answer to a larger request is 431."""
HEADER_S = 5.0
"""Time for a request to be complete, seconds. Afterwards its connection is closed."""
ANSWER_S = 5.0
"""Time for a client to read its answer, seconds. Afterwards its connection is closed."""

Answer = tuple[str, str, bytes]
"""Status, media type, body."""


class HealthServer:
    """Serves /healthz, /readyz and /metrics on `host:port` from `start` to `stop`."""

    def __init__(
        self,
        host: str,
        port: int,
        check: Check,
        role: Callable[[], str | None] = lambda: None,
        warnings: Callable[[], dict[str, str]] = dict,
    ) -> None:
        """Create the server. `start` opens its port.

        `role` returns this instance's role, which /readyz adds to the status; None: no role. `warnings`
        returns what an operator should know about a service that still works, by name.
        """
        self._host, self._port, self._check, self._role = host, port, check, role
        self._warnings = warnings
        self._server: asyncio.Server | None = None
        self._table = ConnectionTable(ConnectionLimits(CONNECTIONS))
        self._open: dict[int, asyncio.Task[None]] = {}

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._connected, self._host, self._port, limit=HEADER_BYTES, backlog=BACKLOG
        )

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        admission = self._table.admit(str(peer[0]) if peer else "")
        if admission.evicted is not None and (evicted := self._open.get(admission.evicted)) is not None:
            evicted.cancel()
        key = admission.key
        if key is None:
            writer.transport.abort()
            return

        def closed(task: asyncio.Task[None]) -> None:
            writer.transport.abort()  # Data that the client has not read would keep the connection open.
            self._open.pop(key, None)
            self._table.close(key)
            if not task.cancelled():
                task.exception()  # Drop it: an error of a client is not logged.

        task = asyncio.create_task(self._answer(key, reader, writer))
        self._open[key] = task
        task.add_done_callback(closed)

    async def _answer(self, key: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            try:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEADER_S)
            except asyncio.LimitOverrunError:
                answer: Answer = ("431 Request Header Fields Too Large", "text/plain", b"headers too large\n")
            else:
                path = head.split(b" ", 2)[1].split(b"?")[0] if head.count(b" ") >= 2 else b""
                answer = self._respond(path.decode("latin-1"))
            self._table.serve(key)
            async with asyncio.timeout(ANSWER_S):
                await _send(writer, answer)

    def _respond(self, path: str) -> Answer:
        if path == "/healthz":
            return "200 OK", "application/json", b'{"status":"ok"}'
        if path == "/readyz":
            checks = self._check()
            good = all(checks.values())
            status = ", ".join(filter(None, ("ready" if good else "not ready", self._role())))
            body = json.dumps({"status": status, "checks": checks, "warnings": self._warnings()}).encode()
            return ("200 OK" if good else "503 Service Unavailable"), "application/json", body
        if path == "/metrics":
            return "200 OK", "text/plain; version=0.0.4", telemetry.prometheus_text()
        return "404 Not Found", "text/plain", b"not found\n"


async def _send(writer: asyncio.StreamWriter, answer: Answer) -> None:
    status, kind, body = answer
    writer.write(
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n".encode()
    )
    writer.write(body)
    await writer.drain()
    writer.close()
    await writer.wait_closed()

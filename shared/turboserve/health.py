"""A small HTTP server in every service: /healthz, /readyz, /metrics. The supervisor and probes read it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress

from turboserve import telemetry

Check = Callable[[], dict[str, bool]]
"""Named conditions; the service is ready when all hold."""


class HealthServer:
    """Serves on `host:port` until closed."""

    def __init__(
        self,
        host: str,
        port: int,
        check: Check,
        role: Callable[[], str | None] = lambda: None,
        warnings: Callable[[], dict[str, str]] = dict,
    ) -> None:
        """`role` is added to the status of a service of which one instance differs from the others.

        `warnings` are what an operator should know of a service that can still be used, by name.
        """
        self._host, self._port, self._check, self._role = host, port, check, role
        self._warnings = warnings
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._answer, self._host, self._port)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5.0)
            path = head.split(b" ", 2)[1].split(b"?")[0] if head.count(b" ") >= 2 else b""
            status, kind, body = self._respond(path.decode("latin-1"))
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
            )
            writer.write(body)
            await writer.drain()
        writer.close()

    def _respond(self, path: str) -> tuple[str, str, bytes]:
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

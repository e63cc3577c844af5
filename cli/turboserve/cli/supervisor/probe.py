"""Probes of a service's readiness and liveness over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from turboserve.cli.embedded.ports import HOST
from turboserve.cli.supervisor.spec import NotReadyError, ServerUnresponsiveError

ANSWER_S = 5.0


def readyz(port: int) -> Callable[[], Awaitable[None]]:
    """Return a probe that succeeds once GET /readyz on `port` answers 200."""
    return _answers(port, "/readyz")


def healthz(port: int) -> Callable[[], Awaitable[None]]:
    """Return a probe that succeeds while the event loop of the process on `port` runs, ready or not."""
    return _answers(port, "/healthz")


def _answers(port: int, path: str) -> Callable[[], Awaitable[None]]:
    async def probe() -> None:
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(HOST, port), ANSWER_S)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
                status = await asyncio.wait_for(reader.readline(), ANSWER_S)
            finally:
                writer.close()
        except TimeoutError as error:
            raise ServerUnresponsiveError(f"no answer on port {port} within {ANSWER_S:.0f} s") from error
        except OSError as error:
            raise NotReadyError(str(error)) from error
        if status.split(b" ")[1:2] != [b"200"]:
            raise NotReadyError(status.decode("latin-1").strip())

    return probe

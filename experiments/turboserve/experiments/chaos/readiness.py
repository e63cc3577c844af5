"""Watches `/readyz` of all services and workers of a stack."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress

import psutil

from turboserve.cli.stack.record import StackRecord

LOOK_S = 0.5
ANSWER_S = 1.0
READY_S = 60.0
"""Time within which every service is to be ready again, seconds."""
UNREACHABLE = "unreachable"


class ReadinessWatch:
    """Collects the conditions that do not hold and the warnings, by service."""

    def __init__(self, record: StackRecord) -> None:
        self._record = record
        self._services = {
            name: int(process["port"])
            for name, process in record.processes.items()
            if process["kind"] == "service"
        }
        self._found: dict[str, dict[str, None]] = {}
        self._clear_at: float | None = None
        """Monotonic time since when no service has a problem."""

    @property
    def states(self) -> dict[str, list[str]]:
        """Service → names of conditions and warnings so far, in the order of their appearance."""
        return {service: list(names) for service, names in sorted(self._found.items())}

    async def run(self) -> None:
        """Look again and again; never returns."""
        while True:
            began_s = time.monotonic()
            ports = self._services | await asyncio.to_thread(self._worker_ports)
            problems = await asyncio.gather(*(_problems(port) for port in ports.values()))
            for name, found in zip(ports, problems, strict=True):
                if found:
                    self._found.setdefault(name.partition(" ")[0], {}).update(dict.fromkeys(found))
            if any(problems):
                self._clear_at = None
            elif self._clear_at is None:
                self._clear_at = began_s
            await asyncio.sleep(LOOK_S)

    async def ready_since(self, at_s: float) -> float | None:
        """Return the seconds from `at_s` until no service had a problem. None: not within `READY_S`."""
        while time.monotonic() < at_s + READY_S:
            if self._clear_at is not None and time.monotonic() > at_s + 2 * (LOOK_S + ANSWER_S):
                return max(0.0, self._clear_at - at_s)
            await asyncio.sleep(LOOK_S)
        return None

    def _worker_ports(self) -> dict[str, int]:
        ports: dict[str, int] = {}
        with suppress(psutil.Error):
            for pid in self._record.worker_pids():
                with suppress(psutil.Error, KeyError, ValueError):
                    ports[f"worker {pid}"] = int(psutil.Process(pid).environ()["TURBOSERVE_HEALTH_PORT"])
        return ports


async def _problems(port: int) -> list[str]:
    """Return the conditions of one service that do not hold, and its warnings."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: service\r\nConnection: close\r\n\r\n")
                answer = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return [UNREACHABLE]
    return [name for name, holds in answer["checks"].items() if not holds] + list(answer["warnings"])

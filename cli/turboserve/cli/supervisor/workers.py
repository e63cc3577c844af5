"""Counts the worker processes that serve. Recognizes workers by their environment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import psutil

from turboserve.cli.supervisor.probe import readyz
from turboserve.cli.supervisor.spec import NotReadyError

WORKER_VARIABLE = "TURBOSERVE_WORKER_ID"
HEALTH_VARIABLE = "TURBOSERVE_HEALTH_PORT"


async def count_ready(processes: Iterable[psutil.Process]) -> int:
    """Return how many of `processes` are workers that answer /readyz with 200."""
    ports = {port for process in processes if (port := _health_port(process)) is not None}
    return sum(await asyncio.gather(*(_serves(port) for port in ports)))


async def _serves(port: int) -> bool:
    try:
        await readyz(port)()
    except NotReadyError:
        return False
    return True


def _health_port(process: psutil.Process) -> int | None:
    try:
        environment: dict[str, str] = process.environ()
    except (psutil.Error, OSError):
        return None
    port = environment.get(HEALTH_VARIABLE, "")
    return int(port) if WORKER_VARIABLE in environment and port.isdigit() else None

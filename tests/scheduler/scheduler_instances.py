"""Schedulers as processes with a health port."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from collections.abc import Callable
from typing import Any

from tests.helpers.service_process import LIMIT_S, readiness


class Instance:
    """One scheduler, with a health port."""

    def __init__(self, start: Callable[..., Any], port: int, **variables: str) -> None:
        """`variables` are added to its environment."""
        self.port = port
        health = {"TURBOSERVE_HEALTH_PORT": str(port), "TURBOSERVE_LOG_FORMAT": "json"}
        self.service = start(**health, **variables)

    def status(self) -> str:
        """Return the status of /readyz; empty if it does not answer at the moment."""
        return str(readiness(self.port).get("status", ""))

    def metric(self, name: str) -> float:
        url = f"http://127.0.0.1:{self.port}/metrics"
        text = urllib.request.urlopen(url, timeout=LIMIT_S).read().decode()
        return float(next(line for line in text.splitlines() if line.startswith(name)).split()[-1])

    async def becomes(self, status: str) -> None:
        deadline = asyncio.get_running_loop().time() + LIMIT_S
        while (now := await asyncio.to_thread(self.status)) != status:
            assert asyncio.get_running_loop().time() < deadline, f"it is {now!r}, not {status!r}"
            await asyncio.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.service.pid, number)

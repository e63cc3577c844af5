"""Probes whether the hot store accepts writes."""

from __future__ import annotations

import asyncio

from turboserve import logs
from turboserve.state_store.hot.session_state import ATTEMPT_S, HotStoreGuard
from turboserve.state_store.ports.hot import HotRefusedError, HotUnavailableError

PROBE_S = 1.0

log = logs.get("redis")


class HotStoreProbe:
    """Writes a probe at intervals, for the guard and for the warning of the state store."""

    def __init__(self, hot: HotStoreGuard) -> None:
        self._hot = hot
        self._problem: str | None = None

    def warning(self) -> str | None:
        """Return why the store accepts no writes at the moment; None while it does."""
        return self._problem

    async def watch(self, every_s: float = PROBE_S) -> None:
        """Write a probe every `every_s`, for `warning`; never returns."""
        while True:
            problem: Exception | None = None
            try:
                async with asyncio.timeout(ATTEMPT_S):
                    await self._hot.store.probe()
            except (HotUnavailableError, HotRefusedError, OSError) as error:
                problem = error
            self._hot.refuses = isinstance(problem, HotRefusedError)
            self._note(None if problem is None else f"{type(problem).__name__}: {problem}"[:200])
            await asyncio.sleep(every_s)

    def _note(self, problem: str | None) -> None:
        if problem is None and self._problem is not None:
            log.info("Redis accepts writes again")
        elif problem is not None and self._problem is None:
            log.warning("Redis accepts no writes; continuing without it", error=problem)
        self._problem = problem

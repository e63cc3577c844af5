"""Probes whether the hot store accepts writes, and since when it has kept what it was given."""

from __future__ import annotations

import asyncio

from turboserve import logs
from turboserve.clock import Clock
from turboserve.state_store.hot.session_state import ATTEMPT_S, HotStoreGuard
from turboserve.state_store.ports.hot import HotRefusedError, HotStore, HotUnavailableError

PROBE_S = 1.0
SINCE_TTL_S = 30 * 86_400

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


async def watching_since(hot: HotStoreGuard, clock: Clock) -> float | None:
    """Return since when Redis has kept the times of watching, Unix seconds; None while it is away.

    After a restart, Redis may be empty, or may hold times from before a gap without reports.
    """

    async def run(store: HotStore) -> float:
        # A restart that keeps the keys is a gap as well.
        key = since_key(await store.run_id())
        return await store.first(key, clock.wall(), ttl_s=SINCE_TTL_S)

    return await hot.attempt(run)


def since_key(run: str) -> str:
    """Return the key under which one run of Redis keeps when its reports of viewers began."""
    return f"watching_since:{run}"

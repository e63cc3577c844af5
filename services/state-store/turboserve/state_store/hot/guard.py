"""The hot store behind a guard: short deadlines, and left alone for a while after it failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from turboserve import logs
from turboserve.clock import Clock
from turboserve.state_store.ports.hot import HotRefusedError, HotStore, HotUnavailableError

DEADLINE_S = 0.5
"""For one attempt, which may be several commands."""
REST_S = 1.0
PROBE_S = 1.0

T = TypeVar("T")
log = logs.get("redis")


class HotStoreGuard:
    """Callers get None when the hot store is down, and go on without."""

    def __init__(self, store: HotStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._rest_until = 0.0
        self._quiet_until = 0.0
        self._problem: str | None = None
        self._refuses = False

    async def attempt(self, work: Callable[[HotStore], Awaitable[T]]) -> T | None:
        """What `work` returns, or None if the store does not answer (now, or a moment ago) or refuses."""
        if self._clock.monotonic() < self._rest_until:
            return None
        try:
            async with asyncio.timeout(DEADLINE_S):
                result = await work(self._store)
        except (HotUnavailableError, OSError) as error:
            # TimeoutError is an OSError.
            if self._rest_until == 0.0:
                log.warning("Redis does not answer; going on without", error=repr(error))
            self._rest_until = self._clock.monotonic() + REST_S
            return None
        except HotRefusedError as error:
            # Out of memory, or of disk (MISCONF): it may take it later, and what is only read is still there.
            if self._clock.monotonic() >= self._quiet_until:
                self._quiet_until = self._clock.monotonic() + REST_S
                log.warning("Redis refuses", error=str(error))
            return None
        if self._rest_until:
            log.info("Redis answers again")
            self._rest_until = 0.0
        return result

    @property
    def backing_off(self) -> bool:
        """Whether what it holds may be old: it does not answer, or it takes no writes."""
        return self._rest_until > 0.0 or self._refuses

    def warning(self) -> str | None:
        """Why nothing can be written at the moment; None while it can."""
        return self._problem

    async def watch(self, every_s: float = PROBE_S) -> None:
        """Write a probe now and then, for readiness; never returns."""
        while True:
            problem: Exception | None = None
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await self._store.probe()
            except (HotUnavailableError, HotRefusedError, OSError) as error:
                problem = error
            self._refuses = isinstance(problem, HotRefusedError)
            self._note(None if problem is None else f"{type(problem).__name__}: {problem}"[:200])
            await asyncio.sleep(every_s)

    def _note(self, problem: str | None) -> None:
        if problem is None and self._problem is not None:
            log.info("Redis takes writes again")
        elif problem is not None and self._problem is None:
            log.warning("Redis takes no writes; going on without", error=problem)
        self._problem = problem

    async def close(self) -> None:
        await self._store.close()

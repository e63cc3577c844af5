"""A guard in front of the hot store: short deadlines, and a pause after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from turboserve import logs
from turboserve.clock import Clock
from turboserve.state_store.ports.hot import HotRefusedError, HotStore, HotUnavailableError

DEADLINE_S = 0.5
"""Deadline of one attempt, which may consist of several commands, seconds."""
REST_S = 1.0
PROBE_S = 1.0

T = TypeVar("T")
log = logs.get("redis")


class HotStoreGuard:
    """Access to the hot store. Callers get None while it is down, and continue without it."""

    def __init__(self, store: HotStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._rest_until = 0.0
        self._quiet_until = 0.0
        self._problem: str | None = None
        self._refuses = False

    async def attempt(self, work: Callable[[HotStore], Awaitable[T]]) -> T | None:
        """Return the result of `work`; None if the store refuses or does not answer, now or a moment ago."""
        if self._clock.monotonic() < self._rest_until:
            return None
        try:
            async with asyncio.timeout(DEADLINE_S):
                result = await work(self._store)
        except (HotUnavailableError, OSError) as error:
            # TimeoutError is an OSError.
            if self._rest_until == 0.0:
                log.warning("Redis does not answer; continuing without it", error=repr(error))
            self._rest_until = self._clock.monotonic() + REST_S
            return None
        except HotRefusedError as error:
            # Out of memory or disk (MISCONF): Redis may accept the write later, and still answers reads.
            if self._clock.monotonic() >= self._quiet_until:
                self._quiet_until = self._clock.monotonic() + REST_S
                log.warning("Redis refused a command", error=str(error))
            return None
        if self._rest_until:
            log.info("Redis answers again")
            self._rest_until = 0.0
        return result

    @property
    def backing_off(self) -> bool:
        """Whether the store's content may be old: the store does not answer or accepts no writes."""
        return self._rest_until > 0.0 or self._refuses

    def warning(self) -> str | None:
        """Return why the store accepts no writes at the moment; None while it does."""
        return self._problem

    async def watch(self, every_s: float = PROBE_S) -> None:
        """Write a probe every `every_s`, for `warning`; never returns."""
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
            log.info("Redis accepts writes again")
        elif problem is not None and self._problem is None:
            log.warning("Redis accepts no writes; continuing without it", error=problem)
        self._problem = problem

    async def close(self) -> None:
        await self._store.close()

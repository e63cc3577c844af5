"""Redis behind a guard: short deadlines, and left alone for a while after it failed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from turboserve import logs
from turboserve.state_store.settings import Settings

DEADLINE_S = 0.25
"""For one command; an attempt, which may be several, takes at most twice that."""
REST_S = 1.0
CONNECTIONS = 16
PROBE_KEY = "write-probe"
PROBE_S = 1.0
PROBE_TTL_S = 60

T = TypeVar("T")
log = logs.get("redis")


class Hot:
    """The connection. Callers get None when Redis is down, and go on without."""

    def __init__(self, settings: Settings) -> None:
        pool = BlockingConnectionPool.from_url(
            settings.redis_url.get_secret_value(),
            socket_timeout=DEADLINE_S,
            socket_connect_timeout=DEADLINE_S,
            max_connections=CONNECTIONS,
            timeout=DEADLINE_S,
            # Once more and at once: a connection that an earlier Redis left behind is found out by using it.
            retry=Retry(NoBackoff(), 1),
        )
        self._redis: Redis = Redis.from_pool(pool)
        self._rest_until = 0.0
        self._quiet_until = 0.0
        self._trouble: str | None = None
        self._refuses = False

    async def attempt(self, work: Callable[[Redis], Awaitable[T]]) -> T | None:
        """What `work` returns, or None if Redis does not answer (now, or a moment ago) or refuses."""
        if time.monotonic() < self._rest_until:
            return None
        try:
            async with asyncio.timeout(2 * DEADLINE_S):
                result = await work(self._redis)
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            if self._rest_until == 0.0:
                log.warning("Redis does not answer; going on without", error=repr(error))
            self._rest_until = time.monotonic() + REST_S
            return None
        except RedisError as error:
            # Out of memory, or of disk (MISCONF): it may take it later, and what is only read is still there.
            if time.monotonic() >= self._quiet_until:
                self._quiet_until = time.monotonic() + REST_S
                log.warning("Redis refuses", error=str(error))
            return None
        if self._rest_until:
            log.info("Redis answers again")
            self._rest_until = 0.0
        return result

    @property
    def resting(self) -> bool:
        """Whether what it holds may be old: it does not answer, or it takes no writes."""
        return self._rest_until > 0.0 or self._refuses

    def warning(self) -> str | None:
        """Why nothing can be written at the moment; None while it can."""
        return self._trouble

    async def watch(self, every_s: float = PROBE_S) -> None:
        """Write a probe now and then, for readiness; never returns."""
        while True:
            trouble: Exception | None = None
            try:
                async with asyncio.timeout(2 * DEADLINE_S):
                    await self._redis.set(PROBE_KEY, 1, ex=PROBE_TTL_S)
            except (RedisError, OSError) as error:
                trouble = error
            self._refuses = isinstance(trouble, ResponseError)
            self._note(None if trouble is None else f"{type(trouble).__name__}: {trouble}"[:200])
            await asyncio.sleep(every_s)

    def _note(self, trouble: str | None) -> None:
        if trouble is None and self._trouble is not None:
            log.info("Redis takes writes again")
        elif trouble is not None and self._trouble is None:
            log.warning("Redis takes no writes; going on without", error=trouble)
        self._trouble = trouble

    async def close(self) -> None:
        await self._redis.aclose()

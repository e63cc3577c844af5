"""Redis behind a guard: short deadlines, and left alone for a while after it failed."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from turboserve import logs
from turboserve.state_store.settings import Settings

DEADLINE_S = 0.25
REST_S = 1.0

T = TypeVar("T")
log = logs.get("redis")


class Hot:
    """The connection. Callers get None when Redis is down, and go on without."""

    def __init__(self, settings: Settings) -> None:
        self._redis: Redis = Redis.from_url(
            settings.redis_url.get_secret_value(),
            socket_timeout=DEADLINE_S,
            socket_connect_timeout=DEADLINE_S,
            max_connections=16,
            retry_on_timeout=False,
        )
        self._rest_until = 0.0

    async def attempt(self, work: Callable[[Redis], Awaitable[T]]) -> T | None:
        """What `work` returns, or None if Redis does not answer (now, or a moment ago)."""
        if time.monotonic() < self._rest_until:
            return None
        try:
            result = await work(self._redis)
        except (RedisError, OSError) as error:
            if self._rest_until == 0.0:
                log.warning("Redis does not answer; going on without", error=repr(error))
            self._rest_until = time.monotonic() + REST_S
            return None
        if self._rest_until:
            log.info("Redis answers again")
            self._rest_until = 0.0
        return result

    @property
    def resting(self) -> bool:
        return self._rest_until > 0.0

    async def close(self) -> None:
        await self._redis.aclose()

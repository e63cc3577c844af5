"""The hot store on Redis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from turboserve.state_store.ports.hot import (
    DEADLINE_S,
    RETRIES,
    HotRefusedError,
    HotUnavailableError,
)
from turboserve.state_store.settings import Settings

CONNECTIONS = 16
PROBE_KEY = "write-probe"
PROBE_TTL_S = 60

KEEP = """
local key, index, epoch, kept = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4])
local newest = tonumber(redis.call('HGET', key, 'epoch') or -1)
local begins = tonumber(redis.call('HGET', key, 'begins') or index)
if epoch < newest then
  -- A former owner's: they fill a gap before the newest owner's first, and remove nothing.
  if index < begins and index > begins - kept then redis.call('HSETNX', key, index, ARGV[3]) end
  return 0
end
redis.call('HSET', key, index, ARGV[3], 'epoch', epoch)
if epoch > newest then redis.call('HSET', key, 'begins', index) end
for _, field in ipairs(redis.call('HKEYS', key)) do
  local old = tonumber(field)
  -- What a former owner made behind the place at which this one goes on is not the log's.
  if old and ((old > 0 and old <= index - kept) or (epoch > newest and old > index)) then
    redis.call('HDEL', key, field)
  end
end
redis.call('EXPIRE', key, ARGV[5])
return 1
"""
"""Keeps latents. Fields: the index of a chunk, `epoch` (the newest), `begins` (first index of this epoch)."""


class RedisStore:
    """`ports.hot.HotStore` on a pool of connections."""

    def __init__(self, settings: Settings) -> None:
        pool = BlockingConnectionPool.from_url(
            settings.redis_url.get_secret_value(),
            socket_timeout=DEADLINE_S,
            socket_connect_timeout=DEADLINE_S,
            max_connections=CONNECTIONS,
            timeout=DEADLINE_S,
            retry=Retry(NoBackoff(), RETRIES),
        )
        self._redis: Redis = Redis.from_pool(pool)

    async def keep_latents(
        self, key: str, index: int, epoch: int, value: bytes, *, kept: int, ttl_s: int
    ) -> None:
        arguments: list[str | bytes | int] = [index, epoch, value, kept, ttl_s]
        with _typed_errors():
            await self._redis.eval(KEEP, 1, key, *arguments)

    async def latents(self, key: str, index: int) -> bytes | None:
        with _typed_errors():
            value = await self._redis.hget(key, str(index))
        return value.encode() if isinstance(value, str) else value

    async def write(self, hashes: Mapping[str, Mapping[str, float]], *, ttl_s: int) -> None:
        with _typed_errors():
            async with self._redis.pipeline(transaction=False) as pipe:
                for key, fields in hashes.items():
                    mapping: dict[Any, Any] = dict(fields)
                    pipe.hset(key, mapping=mapping)
                    pipe.expire(key, ttl_s)
                await pipe.execute()

    async def read(self, keys: Sequence[str], fields: Sequence[str]) -> list[list[float | None]]:
        with _typed_errors():
            async with self._redis.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.hmget(key, list(fields))
                rows: list[list[bytes | None]] = await pipe.execute()
        return [[None if value is None else float(value) for value in row] for row in rows]

    async def first(self, key: str, value: float, *, ttl_s: int) -> float:
        with _typed_errors():
            await self._redis.set(key, value, nx=True)
            await self._redis.expire(key, ttl_s)
            return float(await self._redis.get(key) or value)

    async def run_id(self) -> str:
        with _typed_errors():
            return str((await self._redis.info("server"))["run_id"])

    async def delete(self, key: str) -> None:
        with _typed_errors():
            await self._redis.delete(key)

    async def probe(self) -> None:
        with _typed_errors():
            await self._redis.set(PROBE_KEY, 1, ex=PROBE_TTL_S)

    async def close(self) -> None:
        await self._redis.aclose()


@contextmanager
def _typed_errors() -> Iterator[None]:
    try:
        yield
    except (RedisConnectionError, RedisTimeoutError, OSError) as error:
        raise HotUnavailableError(repr(error)) from error
    except RedisError as error:
        raise HotRefusedError(str(error)) from error

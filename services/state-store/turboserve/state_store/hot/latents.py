"""The last clean latents of each session: from them another worker rebuilds what a dead one held."""

from __future__ import annotations

from redis.asyncio import Redis

from turboserve.contracts.chunks import LatentsHeader
from turboserve.contracts.errors import NotFoundError
from turboserve.contracts.requests import GetLatents
from turboserve.state_store.hot.redis import Hot

KEEP = """
local epoch = redis.call('HGET', KEYS[1], 'epoch:' .. ARGV[1])
if epoch and tonumber(epoch) > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3], 'epoch:' .. ARGV[1], ARGV[2])
for old = math.max(1, ARGV[1] - 2 * ARGV[4]), ARGV[1] - ARGV[4] do
  redis.call('HDEL', KEYS[1], old, 'epoch:' .. old)
end
redis.call('EXPIRE', KEYS[1], ARGV[5])
return 1
"""
"""An earlier owner's late latents never replace those of the current one. Chunk 0, the sink, stays."""


class Latents:
    """One hash per session: chunk index → header line, then raw bytes."""

    def __init__(self, hot: Hot, *, kept: int, ttl_s: float) -> None:
        self._hot, self._kept, self._ttl_s = hot, kept, int(ttl_s)

    async def keep(self, header: LatentsHeader, data: bytes) -> None:
        value = header.to_bytes() + b"\n" + data
        arguments: list[str | bytes | int] = [header.index, header.epoch, value, self._kept, self._ttl_s]

        async def run(redis: Redis) -> None:
            await redis.eval(KEEP, 1, _key(header.session), *arguments)

        await self._hot.attempt(run)

    async def get(self, request: GetLatents) -> tuple[LatentsHeader, bytes]:
        """Raises NotFoundError: never kept, no longer kept, or Redis is down. Go on from empty context."""

        async def run(redis: Redis) -> bytes | None:
            value = await redis.hget(_key(request.session), str(request.index))
            return value.encode() if isinstance(value, str) else value

        value = await self._hot.attempt(run)
        if value is None:
            raise NotFoundError(
                f"the latents of chunk {request.index} of session {request.session} are not kept",
                field="index",
                limit=self._kept,
            )
        head, _, data = value.partition(b"\n")
        return LatentsHeader.from_bytes(head), data

    async def forget(self, session: str) -> None:
        async def run(redis: Redis) -> None:
            await redis.delete(_key(session))

        await self._hot.attempt(run)


def _key(session: str) -> str:
    return f"latents:{session}"

"""A gateway with one subscription for each follower: `python -m …`. Everything else is that of production."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import TypeVar

from nats.aio.msg import Msg as NatsMsg

from turboserve.bus import client
from turboserve.bus.feeds import Backlog, LiveFeeds
from turboserve.gateway.__main__ import main

T = TypeVar("T")


class SeparateFeeds(LiveFeeds):
    """Every follower subscribes and asks for itself."""

    @asynccontextmanager
    async def joined(
        self, live: str, backlog: Backlog[T], parse: Callable[[NatsMsg], T]
    ) -> AsyncIterator[None]:
        async with LiveFeeds(self._client).joined(live, backlog, parse):
            yield

    async def shared(self, _key: Hashable, question: Callable[[], Awaitable[T]]) -> T:
        return await question()


if __name__ == "__main__":
    # Before the gateway makes its bus.
    setattr(client, LiveFeeds.__name__, SeparateFeeds)
    main()

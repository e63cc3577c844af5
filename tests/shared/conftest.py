"""A bus per service on a real broker, with the permissions that the table of subjects gives it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from turboserve.bus import Bus
from turboserve.cli.embedded import NatsServer
from turboserve.config import Settings

Connect = Callable[[str], Awaitable[Bus]]


@pytest.fixture
async def connect(nats_url: str, nats_server: NatsServer) -> AsyncIterator[Connect]:
    """`await connect("gateway")`: a bus as that service; `admin` may do everything."""
    async with AsyncExitStack() as stack:

        async def one(service: str) -> Bus:
            bus = await Bus.connect(service, Settings(nats_url=nats_server.url(service)))
            stack.push_async_callback(bus.close)
            return bus

        yield one

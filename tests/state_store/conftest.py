"""The state store in the test's own process, on real servers; and, where it has to die, as a process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from turboserve.state_store.settings import Settings

# The tests are no package: what they share is found beside them.
sys.path.insert(0, str(Path(__file__).parent))

from state_store_harness import Harness, Store


@pytest.fixture(scope="module")
def settings(nats_url: str, redis_url: str, postgres_url: str) -> Settings:
    return Settings(
        nats_url=nats_url,
        redis_url=redis_url,
        postgres_url=postgres_url,
        sweep_s=0.2,
        purge_s=3_600.0,
        # A busy machine is only slow: what refuses admission is a broker that refuses.
        canary_timeout_s=60.0,
        log_level="WARNING",
    )


@pytest.fixture
async def start_store(settings: Settings) -> AsyncIterator[Callable[..., Awaitable[Store]]]:
    """Start one more instance, with settings changed as asked; all are stopped at the end."""
    async with AsyncExitStack() as stack:

        async def start(**changes: Any) -> Store:
            return await stack.enter_async_context(Store.running(settings.model_copy(update=changes)))

        yield start


@pytest.fixture
async def store(start_store: Callable[..., Awaitable[Store]]) -> Store:
    return await start_store()


@pytest.fixture
async def api(store: Store, settings: Settings) -> AsyncIterator[Harness]:
    """Calls the store as the other services do."""
    async with Harness.connected(settings) as harness:
        yield harness
        await asyncio.sleep(0)

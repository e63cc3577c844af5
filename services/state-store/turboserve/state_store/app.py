"""The service on its real servers."""

from __future__ import annotations

from turboserve.service import Runtime
from turboserve.state_store.composition import compose
from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.hot.redis import RedisStore
from turboserve.state_store.settings import Settings


async def start(runtime: Runtime, settings: Settings) -> None:
    """Returns once every endpoint is answered."""
    await compose(runtime, settings, PostgresDatabase(settings), RedisStore(settings))

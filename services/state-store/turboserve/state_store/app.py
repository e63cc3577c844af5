"""Starts the service on Postgres and Redis."""

from __future__ import annotations

from turboserve.service import Runtime
from turboserve.state_store.composition import compose
from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.hot.redis import RedisStore
from turboserve.state_store.settings import Settings


async def start(runtime: Runtime, settings: Settings) -> None:
    """Start the service. Returns once it answers every endpoint."""
    await compose(runtime, settings, PostgresDatabase(settings), RedisStore(settings))

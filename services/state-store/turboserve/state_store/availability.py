"""Waits for Postgres at the start, and watches it for readiness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from turboserve import logs
from turboserve.bus.round_trip import RoundTrip
from turboserve.contracts.errors import UnavailableError
from turboserve.state_store.ports.database import Database

RETRY_S = 0.5
PING_S = 1.0

log = logs.get("postgres")


async def migrate_with_retry(database: Database) -> None:
    """Bring the schema up to date. Waits for Postgres without a limit."""
    while True:
        try:
            await database.migrate()
            await database.ping()
            return
        except UnavailableError as error:
            log.warning("Postgres not reachable yet", error=error.detail)
            await asyncio.sleep(RETRY_S)


async def watch(database: Database, writes: RoundTrip, monotonic: Callable[[], float]) -> None:
    """Keep `reachable` and the time of a write up to date, for readiness; never returns."""
    while True:
        writes.asked(monotonic())
        if await database.ping():
            writes.answered(monotonic())
        await asyncio.sleep(PING_S)

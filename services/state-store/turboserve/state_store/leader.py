"""Runs work in one instance at a time, under a lock that Postgres keeps while the connection lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from turboserve import logs
from turboserve.contracts.errors import UnavailableError
from turboserve.state_store.ports.database import Database, StatementError
from turboserve.tasks import stop

CHECK_S = 1.0

log = logs.get("leader")


async def lead(database: Database, key: int, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` while this instance holds the lock `key`, and cancel it on loss; never returns."""
    while True:
        try:
            await _term(database, key, work)
        except (UnavailableError, StatementError, OSError) as error:
            log.warning("leadership lost", error=repr(error).splitlines()[0][:200])
        await asyncio.sleep(CHECK_S)


async def _term(database: Database, key: int, work: Callable[[], Awaitable[None]]) -> None:
    async with database.session_lock(key) as lock:
        while not await lock.acquire():
            await asyncio.sleep(CHECK_S)
        log.info("leads")
        task = asyncio.ensure_future(work())
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=CHECK_S)
                await lock.confirm()
            await task
        finally:
            await stop(task)

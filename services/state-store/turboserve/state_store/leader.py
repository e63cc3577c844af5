"""Runs work in one instance at a time, under a lock that Postgres keeps while the connection lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from turboserve import logs
from turboserve.contracts.errors import UnavailableError
from turboserve.state_store.ports.database import Database, StatementError
from turboserve.tasks import stop

CHECK_S = 1.0
"""Maximum time between two checks of the lock, seconds."""
CHECK_SHARE = 0.2
"""The same as a share of the time-out."""

log = logs.get("leader")


async def lead(
    database: Database, key: int, work: Callable[[], Awaitable[None]], timeout_s: float = 5.0
) -> None:
    """Run `work` while this instance holds the lock `key`, and cancel it on loss; never returns.

    Another instance gets the lock after `timeout_s` of this one's silence.
    """
    check_s = min(CHECK_S, CHECK_SHARE * timeout_s)
    while True:
        try:
            await _term(database, key, work, timeout_s, check_s)
        except (UnavailableError, StatementError, OSError) as error:
            log.warning("leadership lost", error=repr(error).splitlines()[0][:200])
        await asyncio.sleep(check_s)


async def _term(
    database: Database, key: int, work: Callable[[], Awaitable[None]], timeout_s: float, check_s: float
) -> None:
    async with database.session_lock(key, timeout_s) as lock:
        while not await lock.acquire():
            await asyncio.sleep(check_s)
        log.info("leads")
        task = asyncio.ensure_future(work())
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=check_s)
                await lock.confirm()
            await task
        finally:
            await stop(task)

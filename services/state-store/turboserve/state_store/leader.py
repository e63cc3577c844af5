"""Runs what one instance at a time does, under a lock that Postgres keeps while the connection lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

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
    database: Database, key: int, *works: Callable[[], Awaitable[None]], timeout_s: float = 5.0
) -> None:
    """Run `works` while this instance holds the lock `key`, and cancel them on loss; never returns.

    If one of them returns, the others are cancelled, and the instances compete for the lock again. Another
    instance gets the lock after `timeout_s` of this one's silence. The lock keeps work from being done
    twice. It does not keep a stopped holder that continues from writing once more: each work has to commit
    nothing that depends on being alone.
    """
    check_s = min(CHECK_S, CHECK_SHARE * timeout_s)
    while True:
        try:
            await _term(database, key, works, timeout_s, check_s)
        except (UnavailableError, StatementError, OSError) as error:
            log.warning("leadership lost", error=repr(error).splitlines()[0][:200])
        await asyncio.sleep(check_s)


async def _term(
    database: Database,
    key: int,
    works: Sequence[Callable[[], Awaitable[None]]],
    timeout_s: float,
    check_s: float,
) -> None:
    async with database.session_lock(key, timeout_s) as lock:
        while not await lock.acquire():
            await asyncio.sleep(check_s)
        log.info("leads")
        tasks = [asyncio.ensure_future(work()) for work in works]
        try:
            while not any(task.done() for task in tasks):
                await asyncio.wait(tasks, timeout=check_s, return_when=asyncio.FIRST_COMPLETED)
                await lock.confirm()
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            # All at once: none may go on without the lock while another one ends.
            await stop(*tasks)

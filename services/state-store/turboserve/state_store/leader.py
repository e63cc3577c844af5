"""One instance at a time: a lock that Postgres holds for as long as the connection lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import asyncpg
from sqlalchemy import exc, text

from turboserve import logs
from turboserve.state_store.database import Database

CHECK_S = 1.0

log = logs.get("leader")


async def lead(database: Database, key: int, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` whenever this instance holds the lock `key`, cancel it when it does not; never returns."""
    while True:
        try:
            await _term(database, key, work)
        except (exc.SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
            log.warning("lost the lead", error=repr(error).splitlines()[0][:200])
        await asyncio.sleep(CHECK_S)


async def _term(database: Database, key: int, work: Callable[[], Awaitable[None]]) -> None:
    engine = database.engine.execution_options(isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        task: asyncio.Future[None] | None = None
        try:
            while task is None or not task.done():
                query = "select pg_try_advisory_lock(:key)" if task is None else "select true"
                async with asyncio.timeout(3.0):
                    held = (
                        await connection.execute(text(query), {"key": key} if task is None else {})
                    ).scalar()
                if held and task is None:
                    log.info("leads")
                    task = asyncio.ensure_future(work())
                await asyncio.wait(
                    {task} if task else {asyncio.create_task(asyncio.sleep(CHECK_S))}, timeout=CHECK_S
                )
            await task
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            # The lock goes with the connection, which must not return to the pool with it.
            await connection.invalidate()

"""One instance at a time: a lock that Postgres holds for as long as the connection lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import asyncpg
from sqlalchemy import TextClause, exc, text
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve import logs
from turboserve.state_store.database import Database
from turboserve.tasks import stop

CHECK_S = 1.0
ANSWER_S = 3.0

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
        try:
            while not await _ask(connection, text("select pg_try_advisory_lock(:key)").bindparams(key=key)):
                await asyncio.sleep(CHECK_S)
            log.info("leads")
            task = asyncio.ensure_future(work())
            try:
                while not task.done():
                    await asyncio.wait({task}, timeout=CHECK_S)
                    await _ask(connection, text("select true"))
                await task
            finally:
                await stop(task)
        finally:
            # The lock goes with the connection, which must not return to the pool with it.
            await connection.invalidate()


async def _ask(connection: AsyncConnection, question: TextClause) -> bool:
    async with asyncio.timeout(ANSWER_S):
        return bool((await connection.execute(question)).scalar())

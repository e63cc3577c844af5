"""Postgres as the services see it: one transaction with a deadline, and its troubles as typed errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
from sqlalchemy import event, exc, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from turboserve import logs
from turboserve.contracts.errors import ConflictError, UnavailableError
from turboserve.state_store.settings import Settings

RETRY_AFTER_S = 1.0
TRANSIENT = ("08", "40", "53", "57", "58", "55P03", "25P0", "XX")
"""Beginnings of SQL states that time heals: connection, rollback, resources, operator, system, timeouts."""

_PROBE_ROW = text(
    "insert into cursors (name, sequence) values ('write-probe', 1) "
    "on conflict (name) do update set sequence = cursors.sequence + 1"
)
_PROBE_SPILL = text(
    "select count(*) from (select md5(n::text) as m from generate_series(1, 4000) as n order by m) as spilled"
)

log = logs.get("postgres")


class Database:
    """The pool. Every statement runs inside `transaction`."""

    def __init__(self, settings: Settings) -> None:
        self._deadline_s = settings.transaction_deadline_s
        limit_ms = str(int(settings.transaction_deadline_s * 1000))
        self.engine: AsyncEngine = create_async_engine(
            settings.sqlalchemy_url,
            pool_size=settings.postgres_pool,
            max_overflow=0,
            pool_timeout=settings.transaction_deadline_s,
            connect_args={
                "timeout": settings.transaction_deadline_s,
                "server_settings": {
                    "application_name": "turboserve-state-store",
                    "statement_timeout": limit_ms,
                    "lock_timeout": limit_ms,
                    # A process that was stopped with a lock in hand must not stop the others for good.
                    "idle_in_transaction_session_timeout": limit_ms,
                    # A machine that vanished with a lock in hand must not either.
                    "tcp_keepalives_idle": "5",
                    "tcp_keepalives_interval": "3",
                    "tcp_keepalives_count": "3",
                },
            },
        )
        event.listen(self.engine.sync_engine, "checkout", _refuse_closed)
        self._single = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self.reachable = False
        self._quiet_until = 0.0

    @asynccontextmanager
    async def transaction(self, *, durable: bool = True) -> AsyncIterator[AsyncConnection]:
        """One transaction, committed at the end of the block.

        `durable=False` does not wait for the disk: for what a crash of Postgres may take back. Raises
        `UnavailableError` within the deadline when Postgres is down, slow or restarting, and `ConflictError`
        when another transaction inserted the same thing first.
        """
        async with self._bounded(self.engine) as connection:
            await connection.begin()
            if not durable:
                await connection.execute(text("set local synchronous_commit = off"))
            yield connection
            await connection.commit()

    @asynccontextmanager
    async def statement(self) -> AsyncIterator[AsyncConnection]:
        """For a single statement, which commits itself: two round trips less. Raises as `transaction`."""
        async with self._bounded(self._single) as connection:
            yield connection

    @asynccontextmanager
    async def _bounded(self, engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
        connection = engine.connect()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._deadline_s
        driver: Any = None
        try:
            async with asyncio.timeout_at(deadline):
                await connection.start()
            # Not a cancellation: undoing things politely takes the server's answer and would hang as well.
            driver = (await connection.get_raw_connection()).driver_connection
            cut = loop.call_at(deadline, driver.terminate)
            try:
                yield connection
            finally:
                await connection.close()
                cut.cancel()
        except exc.IntegrityError as error:
            raise ConflictError(f"another request did this first: {error.orig}") from error
        except (exc.SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
            # TimeoutError is an OSError: our own deadline and the driver's both end here.
            if not transient(error):
                raise
            raise self._away(error) from error
        except AttributeError as error:
            # The driver takes several steps for some statements, and trips over a connection cut in between.
            if driver is None or not driver.is_closed():
                raise
            raise self._away(error) from error

    def _away(self, error: BaseException) -> UnavailableError:
        self._complain(error)
        return UnavailableError("the database does not answer at the moment", retry_after_s=RETRY_AFTER_S)

    def _complain(self, error: BaseException) -> None:
        """Once a second at most: a database that is down fails everything at once."""
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + 1.0
            log.warning("transaction given up", error=_brief(error))

    async def ping(self) -> bool:
        """Write something; whether that worked is also kept in `reachable`.

        A server whose disk is full still answers what it only has to read, and may still change a row in a
        page that it has. So the probe lets a sort spill to a new file of its disk, and commits a row.
        """
        try:
            async with self.transaction() as connection:
                await connection.execute(text("set local work_mem = '64kB'"))
                await connection.execute(_PROBE_SPILL)
                # Last: other instances write the same row.
                await connection.execute(_PROBE_ROW)
            self.reachable = True
        except UnavailableError:
            self.reachable = False
        return self.reachable

    async def watch(self, every_s: float = 1.0) -> None:
        """Keep `reachable` true to the facts, for readiness; never returns."""
        while True:
            await self.ping()
            await asyncio.sleep(every_s)

    async def close(self) -> None:
        await self.engine.dispose()


def transient(error: BaseException) -> bool:
    """Whether the same transaction may well succeed later, without anyone changing the program."""
    if isinstance(error, exc.DBAPIError):
        if error.connection_invalidated:
            return True
        state = getattr(error.orig, "sqlstate", None)
        # Without a state it never reached the server: the driver lost the connection.
        return state is None or state.startswith(TRANSIENT)
    if isinstance(error, asyncpg.PostgresError):
        return bool((error.sqlstate or "").startswith(TRANSIENT))
    return isinstance(error, OSError | asyncpg.InterfaceError | exc.TimeoutError)


def _refuse_closed(connection: Any, _record: Any, _proxy: Any) -> None:
    """Leave out connections that the server has closed: the driver knows, and no round trip is needed."""
    if connection.driver_connection.is_closed():
        raise exc.DisconnectionError


def _brief(error: BaseException) -> str:
    return repr(error).splitlines()[0][:200]


async def make_durable(connection: AsyncConnection) -> None:
    """Let a transaction that began without wait for the disk after all."""
    await connection.execute(text("set local synchronous_commit = on"))

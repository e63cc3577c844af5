"""The database port on Postgres: transactions with a deadline, locks, and typed errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any

import asyncpg
from opentelemetry.trace import SpanKind
from sqlalchemy import TextClause, exc, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from turboserve import logs
from turboserve.contracts.errors import ConflictError, UnavailableError
from turboserve.state_store.connections import KeptConnections
from turboserve.state_store.migrate import migrate
from turboserve.state_store.ports.database import LOCK_ANSWER_S, LOCK_SILENCE_S, StatementError, unavailable
from turboserve.state_store.repository.admission import SqlAdmission, SqlTenants
from turboserve.state_store.repository.cost import SqlCorrections, SqlRentals
from turboserve.state_store.repository.deployment import SqlClocks, SqlLeaders, SqlPools, SqlWorkers
from turboserve.state_store.repository.keys import SqlKeys
from turboserve.state_store.repository.progress import SqlFence, SqlOutbox, SqlProgress
from turboserve.state_store.repository.sessions import SqlChanges, SqlControls, SqlSessions
from turboserve.state_store.settings import Settings
from turboserve.telemetry import set_error, tracer

TRANSIENT = ("08", "40", "53", "57", "58", "55P03", "25P0", "XX")
"""Prefixes of temporary SQL states: connection, rollback, resources, operator, system, timeouts."""

NOT_SET_UP = ("3D000", "28000", "28P01")
"""SQL states of a server during its setup: it answers before it has its database, role and password."""

NO_NEW_CONNECTIONS = "57P03"
"""SQL state of a server that starts, or that waits until its clients have disconnected."""

_LOCK = text("select set_config('idle_session_timeout', :limit_ms, false), pg_advisory_lock(:key)")
_UNLOCK = text("select set_config('idle_session_timeout', '0', false), pg_advisory_unlock(:key)")
_TRY_LOCK = text(
    "select pg_try_advisory_lock(:key) from set_config('idle_session_timeout', :limit_ms, false)"
)
_PROBE_ROW = text(
    "insert into cursors (name, sequence) values ('write-probe', 1) "
    "on conflict (name) do update set sequence = cursors.sequence + 1"
)
_PROBE_SPILL = text(
    "select count(*) from (select md5(n::text) as m from generate_series(1, 4000) as n order by m) as spilled"
)

log = logs.get("postgres")
_trace = tracer("state_store")
_ATTRIBUTES = {"db.system.name": "postgresql", "db.operation.name": "TRANSACTION"}


class SqlUnitOfWork:
    """`UnitOfWork` in SQL: all repositories on one connection."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection
        self.admission = SqlAdmission(connection)
        self.changes = SqlChanges(connection)
        self.clocks = SqlClocks(connection)
        self.controls = SqlControls(connection)
        self.fence = SqlFence(connection)
        self.leaders = SqlLeaders(connection)
        self.outbox = SqlOutbox(connection)
        self.pools = SqlPools(connection)
        self.progress = SqlProgress(connection)
        self.sessions = SqlSessions(connection)
        self.tenants = SqlTenants(connection)
        self.workers = SqlWorkers(connection)

    # Sessions do not need the repositories of cost and keys.
    @cached_property
    def corrections(self) -> SqlCorrections:
        return SqlCorrections(self.connection)

    @cached_property
    def rentals(self) -> SqlRentals:
        return SqlRentals(self.connection)

    @cached_property
    def keys(self) -> SqlKeys:
        return SqlKeys(self.connection)

    async def make_durable(self) -> None:
        await self.connection.execute(text("set local synchronous_commit = on"))


class PostgresDatabase:
    """`ports.database.Database` on a pool of connections."""

    def __init__(self, settings: Settings) -> None:
        self._deadline_s = settings.transaction_deadline_s
        self._limit_ms = limit_ms = str(int(settings.transaction_deadline_s * 1000))
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
                    # A stopped process that holds a lock must not block the other processes forever.
                    "idle_in_transaction_session_timeout": limit_ms,
                    # Nor must a machine that vanishes while it holds a lock.
                    "tcp_keepalives_idle": "5",
                    "tcp_keepalives_interval": "3",
                    "tcp_keepalives_count": "3",
                },
            },
        )
        self._connections = KeptConnections(self.engine)
        self._single = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self.reachable = False
        self._quiet_until = 0.0

    @asynccontextmanager
    async def transaction(self, *, durable: bool = True) -> AsyncIterator[SqlUnitOfWork]:
        # Not the current span: what the transaction stores continues the request.
        span = _trace.start_child("TRANSACTION", kind=SpanKind.CLIENT, attributes=_ATTRIBUTES)
        try:
            async with self._bounded(self.engine) as connection:
                await connection.begin()
                if not durable:
                    await connection.execute(text("set local synchronous_commit = off"))
                yield SqlUnitOfWork(connection)
                await connection.commit()
        except BaseException as error:
            set_error(span, error, failed=isinstance(error, UnavailableError))
            raise
        finally:
            span.end()

    @asynccontextmanager
    async def statement(self) -> AsyncIterator[SqlUnitOfWork]:
        async with self._bounded(self._single) as connection:
            yield SqlUnitOfWork(connection)

    @asynccontextmanager
    async def exclusive(self, key: int) -> AsyncIterator[SqlUnitOfWork]:
        async with self._bounded(self._single) as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            try:
                # If the process is stopped, only the server can end the session and thereby release the lock.
                await connection.execute(_LOCK, {"key": key, "limit_ms": self._limit_ms})
                yield SqlUnitOfWork(connection)
                await connection.execute(_UNLOCK, {"key": key})
            except BaseException:
                # The connection must not return to the pool with the lock.
                driver.terminate()
                raise

    @asynccontextmanager
    async def session_lock(self, key: int) -> AsyncIterator[PostgresSessionLock]:
        connection = self._single.connect()
        try:
            await connection.start()
        except (exc.SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
            raise self._failed(error) from error
        try:
            ended = self._connections.ended()
            yield PostgresSessionLock(connection, key, self._failed, ended)
        finally:
            # Closing the connection releases the lock. It must not return to the pool with the lock.
            await connection.invalidate()
            await connection.close()

    async def migrate(self) -> None:
        try:
            await migrate(self.engine)
        except (exc.SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
            if _state(error) in NOT_SET_UP:
                raise self._away(error) from error
            raise self._failed(error) from error

    @asynccontextmanager
    async def _bounded(self, engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
        connection = engine.connect()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._deadline_s
        driver: Any = None
        try:
            async with asyncio.timeout_at(deadline):
                await connection.start()
            # Terminate instead of cancel: a rollback waits for the server's answer and would hang as well.
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
            # TimeoutError is an OSError: the deadline of this class and the driver's both end here.
            raise self._failed(error) from error
        except AttributeError as error:
            # The driver runs some statements in steps, and fails like this if the connection ends in between.
            if driver is None or not driver.is_closed():
                raise
            raise self._away(error) from error

    def _failed(self, error: BaseException) -> Exception:
        """Return the port's error for an error of the driver."""
        if _state(error) == NO_NEW_CONNECTIONS:
            self._connections.disconnect()
        return self._away(error) if transient(error) else StatementError(repr(error))

    def _away(self, error: BaseException) -> UnavailableError:
        self._complain(error)
        return unavailable()

    def _complain(self, error: BaseException) -> None:
        """Log the error, at most once per second: a database that is down fails all transactions at once."""
        now = asyncio.get_running_loop().time()
        if now >= self._quiet_until:
            self._quiet_until = now + 1.0
            log.warning("transaction aborted", error=_brief(error))

    async def ping(self) -> bool:
        """Write something, and keep in `reachable` whether that worked.

        A server whose disk is full still answers reads, and may still change a row in an existing page. So
        the probe makes a sort spill to a new file on the server's disk, and commits a row.
        """
        try:
            async with self.transaction() as unit:
                await unit.connection.execute(text("set local work_mem = '64kB'"))
                await unit.connection.execute(_PROBE_SPILL)
                # The row comes last, since other instances write the same row.
                await unit.connection.execute(_PROBE_ROW)
            self.reachable = True
        except UnavailableError:
            self.reachable = False
        return self.reachable

    async def close(self) -> None:
        await self.engine.dispose()


class PostgresSessionLock:
    """`ports.database.SessionLock` on its own connection."""

    def __init__(
        self,
        connection: AsyncConnection,
        key: int,
        failed: Callable[[BaseException], Exception],
        ended: Callable[[], bool],
    ) -> None:
        """`ended`: whether the connection must be closed."""
        self._connection, self._failed, self._ended = connection, failed, ended
        limit_ms = str(int(LOCK_SILENCE_S * 1000))
        self._try_lock = _TRY_LOCK.bindparams(key=key, limit_ms=limit_ms)

    async def acquire(self) -> bool:
        return await self._ask(self._try_lock)

    async def confirm(self) -> None:
        await self._ask(text("select true"))

    async def _ask(self, question: TextClause) -> bool:
        if self._ended():
            raise unavailable()
        try:
            async with asyncio.timeout(LOCK_ANSWER_S):
                return bool((await self._connection.execute(question)).scalar())
        except (exc.SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
            raise self._failed(error) from error


def transient(error: BaseException) -> bool:
    """Return whether the same transaction may succeed later without a change of the program."""
    if isinstance(error, exc.DBAPIError):
        if error.connection_invalidated:
            return True
        state = _state(error)
        # An error without a state did not come from the server: the driver lost the connection.
        return state is None or state.startswith(TRANSIENT)
    if isinstance(error, asyncpg.PostgresError):
        return bool((error.sqlstate or "").startswith(TRANSIENT))
    return isinstance(error, OSError | asyncpg.InterfaceError | exc.TimeoutError)


def _state(error: BaseException) -> str | None:
    """Return the SQL state of an error; None if it did not come from the server."""
    return getattr(getattr(error, "orig", error), "sqlstate", None)


def _brief(error: BaseException) -> str:
    return repr(error).splitlines()[0][:200]

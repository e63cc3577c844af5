"""The database port on Postgres: transactions with a deadline, locks, and typed errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any

from opentelemetry.trace import SpanKind
from sqlalchemy import exc, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from turboserve.contracts.errors import ConflictError, UnavailableError
from turboserve.state_store.database_errors import (
    DRIVER_ERRORS,
    NOT_SET_UP,
    DatabaseErrors,
    concerns_statement,
    sql_state,
)
from turboserve.state_store.kept_connections import KeptConnections
from turboserve.state_store.migrate import migrate
from turboserve.state_store.ports.database import ADMISSIONS, TURN_SHARE
from turboserve.state_store.repository.admission import ADMISSION_LOCK, SqlAdmission, SqlTenants
from turboserve.state_store.repository.audit import SqlAudit
from turboserve.state_store.repository.changes import SqlChanges
from turboserve.state_store.repository.cost import SqlCorrections, SqlRentals
from turboserve.state_store.repository.deployment import SqlClocks, SqlLeaders, SqlPools, SqlWorkers
from turboserve.state_store.repository.keys import SqlKeys
from turboserve.state_store.repository.links import SqlLinks
from turboserve.state_store.repository.placements import SqlPlacements
from turboserve.state_store.repository.pool_history import SqlPoolHistory
from turboserve.state_store.repository.progress import SqlFence, SqlOutbox, SqlProgress
from turboserve.state_store.repository.recordings import SqlRecordings
from turboserve.state_store.repository.sessions import SqlControls, SqlSessions
from turboserve.state_store.repository.webhooks import SqlWebhooks
from turboserve.state_store.server_limits import STATEMENT_SHARE, connect_args
from turboserve.state_store.session_lock import PostgresSessionLock
from turboserve.state_store.settings import Settings
from turboserve.telemetry import set_error, tracer

# The driver sends each of these in one message. SQLAlchemy begins each transaction with one, and would need
# another one for the setting.
_BEGIN = "begin"
_UNFLUSHED = "; set local synchronous_commit = off"
# A statement of its own, so that the statements after it see what the holder before has committed.
_ADMITS = f"; select pg_advisory_xact_lock({ADMISSION_LOCK})"
_LOCK = text("select set_config('idle_session_timeout', :limit_ms, false), pg_advisory_lock(:key)")
_UNLOCK = text("select set_config('idle_session_timeout', '0', false), pg_advisory_unlock(:key)")
_PROBE = text("""
    with spilled as materialized (
        select md5(n::text) as m from generate_series(1, 4000) as n order by m
    )
    insert into cursors (name, sequence) select 'write-probe', count(*) from spilled
    on conflict (name) do update set sequence = cursors.sequence + 1
""")

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
        self.placements = SqlPlacements(connection)
        self.pools = SqlPools(connection)
        self.progress = SqlProgress(connection)
        self.sessions = SqlSessions(connection)
        self.tenants = SqlTenants(connection)
        self.workers = SqlWorkers(connection)

    # Most sessions do not need these repositories.
    @cached_property
    def corrections(self) -> SqlCorrections:
        return SqlCorrections(self.connection)

    @cached_property
    def rentals(self) -> SqlRentals:
        return SqlRentals(self.connection)

    @cached_property
    def keys(self) -> SqlKeys:
        return SqlKeys(self.connection)

    @cached_property
    def audit(self) -> SqlAudit:
        return SqlAudit(self.connection)

    @cached_property
    def links(self) -> SqlLinks:
        return SqlLinks(self.connection)

    @cached_property
    def pool_history(self) -> SqlPoolHistory:
        return SqlPoolHistory(self.connection)

    @cached_property
    def recordings(self) -> SqlRecordings:
        return SqlRecordings(self.connection)

    @cached_property
    def webhooks(self) -> SqlWebhooks:
        return SqlWebhooks(self.connection)

    async def make_durable(self) -> None:
        await self.connection.execute(text("set local synchronous_commit = on"))


async def _roll_back(driver: Any) -> None:
    """Roll the transaction back. If that fails, close the connection, which must not return to the pool."""
    try:
        await driver.execute("rollback")
    except DRIVER_ERRORS:
        driver.terminate()
    except BaseException:
        driver.terminate()
        raise


class PostgresDatabase:
    """`ports.database.Database` on a pool of connections."""

    def __init__(self, settings: Settings) -> None:
        self._deadline_s = settings.transaction_deadline_s
        self._limit_ms = str(int(self._deadline_s * 1000))
        self.engine: AsyncEngine = create_async_engine(
            settings.sqlalchemy_url,
            pool_size=settings.postgres_pool,
            max_overflow=0,
            pool_timeout=self._deadline_s,
            connect_args=connect_args(self._deadline_s),
        )
        self._connections = KeptConnections(self.engine)
        self._errors = DatabaseErrors(self._connections.disconnect)
        self._single = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._admissions = asyncio.Semaphore(ADMISSIONS)
        self.reachable = False

    @asynccontextmanager
    async def transaction(
        self, *, durable: bool = True, admits: bool = False
    ) -> AsyncIterator[SqlUnitOfWork]:
        # Not the current span: what the transaction stores continues the request.
        span = _trace.start_child("TRANSACTION", kind=SpanKind.CLIENT, attributes=_ATTRIBUTES)
        try:
            async with self._bounded(admits=admits) as (connection, driver):
                began = asyncio.get_running_loop().time()
                try:
                    begin = _BEGIN if durable else _BEGIN + _UNFLUSHED
                    await driver.execute(begin + _ADMITS if admits else begin)
                    yield SqlUnitOfWork(connection)
                    await driver.execute("commit")
                except BaseException as error:
                    await _roll_back(driver)
                    failed = isinstance(error, DRIVER_ERRORS) and not concerns_statement(error)
                    if failed and driver.is_closed() and not self._began_late(began, admits=admits):
                        self._connections.disconnect_idle()
                    raise
        except BaseException as error:
            set_error(span, error, failed=isinstance(error, UnavailableError))
            raise
        finally:
            span.end()

    def _began_late(self, began: float, *, admits: bool) -> bool:
        """Whether a transaction's end may be its own deadline, with a server that works.

        It has waited so long for its turn that less was left than a working server may take for an answer.
        """
        return admits and asyncio.get_running_loop().time() - began < STATEMENT_SHARE * self._deadline_s

    @asynccontextmanager
    async def statement(self) -> AsyncIterator[SqlUnitOfWork]:
        async with self._bounded() as (connection, _):
            yield SqlUnitOfWork(connection)

    @asynccontextmanager
    async def exclusive(self, key: int) -> AsyncIterator[SqlUnitOfWork]:
        async with self._bounded() as (connection, driver):
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
    async def session_lock(self, key: int, silence_s: float) -> AsyncIterator[PostgresSessionLock]:
        connection = self._single.connect()
        try:
            await connection.start()
        except DRIVER_ERRORS as error:
            raise self._errors.convert(error) from error
        try:
            ended = self._connections.ended()
            yield PostgresSessionLock(connection, key, silence_s, self._errors.convert, ended)
        finally:
            # Closing the connection releases the lock. It must not return to the pool with the lock.
            await connection.invalidate()
            await connection.close()

    async def migrate(self) -> None:
        try:
            await migrate(self.engine)
        except DRIVER_ERRORS as error:
            if sql_state(error) in NOT_SET_UP:
                raise self._errors.unavailable(error) from error
            raise self._errors.convert(error) from error

    @asynccontextmanager
    async def _bounded(self, *, admits: bool = False) -> AsyncIterator[tuple[AsyncConnection, Any]]:
        """Return a connection and the driver's own, which are closed at the deadline.

        `admits`: wait first until it is the turn of this one among those that admit. A part of the
        deadline is left then.
        """
        connection = self._single.connect()
        loop = asyncio.get_running_loop()
        now = loop.time()
        deadline = now + self._deadline_s
        driver: Any = None
        turn = False
        try:
            if admits:
                async with asyncio.timeout_at(now + TURN_SHARE * self._deadline_s):
                    turn = await self._admissions.acquire()
            async with asyncio.timeout_at(deadline):
                await connection.start()
            # Terminate instead of cancel: a rollback waits for the server's answer and would hang as well.
            driver = (await connection.get_raw_connection()).driver_connection
            cut = loop.call_at(deadline, driver.terminate)
            try:
                yield connection, driver
            finally:
                await connection.close()
                cut.cancel()
        except exc.IntegrityError as error:
            raise ConflictError(f"another request did this first: {error.orig}") from error
        except DRIVER_ERRORS as error:
            # TimeoutError is an OSError: the deadline of this class and the driver's both end here.
            raise self._errors.convert(error) from error
        except AttributeError as error:
            # The driver runs some statements in steps, and fails like this if the connection ends in between.
            if driver is None or not driver.is_closed():
                raise
            raise self._errors.unavailable(error) from error
        finally:
            if turn:
                self._admissions.release()

    async def ping(self) -> bool:
        """Write something, and keep in `reachable` whether that worked.

        A server whose disk is full still answers reads, and may still change a row in an existing page. So
        the probe makes a sort spill to a new file on the server's disk, and commits a row.
        """
        try:
            async with self.transaction() as unit:
                await unit.connection.execute(text("set local work_mem = '64kB'"))
                # The row is written after the sort, since other instances write the same row.
                await unit.connection.execute(_PROBE)
            self.reachable = True
        except UnavailableError:
            self.reachable = False
        return self.reachable

    async def close(self) -> None:
        await self.engine.dispose()

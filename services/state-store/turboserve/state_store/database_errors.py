"""The errors of Postgres and its driver: which a later attempt may survive, and what the port raises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import asyncpg
from sqlalchemy import exc

from turboserve import logs
from turboserve.contracts.errors import UnavailableError
from turboserve.state_store.ports.database import StatementError, unavailable

DRIVER_ERRORS = (
    exc.SQLAlchemyError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    # Raised for a connection that was lost in the middle of a message.
    asyncpg.InternalClientError,
    OSError,
)
"""What a transaction raises that fails in the driver or at the server."""

TRANSIENT = ("08", "40", "53", "57", "58", "55P03", "25P0", "XX")
"""Prefixes of temporary SQL states: connection, rollback, resources, operator, system, timeouts."""

NOT_SET_UP = ("3D000", "28000", "28P01")
"""SQL states of a server during its setup: it answers before it has its database, role and password."""

CONNECTION = ("08", "25P", "53300", "57P")
"""Prefixes of the states of `TRANSIENT` that concern a connection, not a statement."""

NO_NEW_CONNECTIONS = "57P03"
"""SQL state of a server that starts, or that waits until its clients have disconnected."""

LOG_INTERVAL_S = 1.0
"""Interval at which failed transactions are logged, seconds."""

log = logs.get("postgres")


class DatabaseErrors:
    """Converts the driver's errors to the port's."""

    def __init__(self, no_new_connections: Callable[[], None]) -> None:
        """`no_new_connections` is called when the server refuses new connections."""
        self._no_new_connections = no_new_connections
        self._quiet_until = 0.0

    def convert(self, error: BaseException) -> Exception:
        """Return the port's error for one of `DRIVER_ERRORS`."""
        if sql_state(error) == NO_NEW_CONNECTIONS:
            self._no_new_connections()
        return self.unavailable(error) if transient(error) else StatementError(repr(error))

    def unavailable(self, error: BaseException) -> UnavailableError:
        """Return the port's error for one that a later attempt may survive.

        It is logged at most once per `LOG_INTERVAL_S`: while a database is down, all transactions fail.
        """
        now = asyncio.get_running_loop().time()
        if now >= self._quiet_until:
            self._quiet_until = now + LOG_INTERVAL_S
            log.warning("transaction aborted", error=brief(error))
        return unavailable(answered=concerns_statement(error))


def transient(error: BaseException) -> bool:
    """Return whether the same transaction may succeed later without a change of the program."""
    if isinstance(error, exc.DBAPIError):
        if error.connection_invalidated:
            return True
        state = sql_state(error)
        # An error without a state did not come from the server: the driver lost the connection.
        return state is None or state.startswith(TRANSIENT)
    if isinstance(error, asyncpg.PostgresError):
        return bool((error.sqlstate or "").startswith(TRANSIENT))
    return isinstance(
        error, OSError | asyncpg.InterfaceError | asyncpg.InternalClientError | exc.TimeoutError
    )


def concerns_statement(error: BaseException) -> bool:
    """Return whether the server refused a statement, on a connection that works."""
    state = sql_state(error)
    return state is not None and not state.startswith(CONNECTION)


def sql_state(error: BaseException) -> str | None:
    """Return the SQL state of an error; None if it did not come from the server."""
    return getattr(getattr(error, "orig", error), "sqlstate", None)


def brief(error: BaseException) -> str:
    """Return the error's first line, for a log line."""
    return repr(error).splitlines()[0][:200]

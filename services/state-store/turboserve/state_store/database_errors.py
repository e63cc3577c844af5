"""The errors of Postgres and its driver: which of them a later attempt may survive."""

from __future__ import annotations

import asyncpg
from sqlalchemy import exc

TRANSIENT = ("08", "40", "53", "57", "58", "55P03", "25P0", "XX")
"""Prefixes of temporary SQL states: connection, rollback, resources, operator, system, timeouts."""

NOT_SET_UP = ("3D000", "28000", "28P01")
"""SQL states of a server during its setup: it answers before it has its database, role and password."""

NO_NEW_CONNECTIONS = "57P03"
"""SQL state of a server that starts, or that waits until its clients have disconnected."""


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
    return isinstance(error, OSError | asyncpg.InterfaceError | exc.TimeoutError)


def sql_state(error: BaseException) -> str | None:
    """Return the SQL state of an error; None if it did not come from the server."""
    return getattr(getattr(error, "orig", error), "sqlstate", None)


def brief(error: BaseException) -> str:
    """Return the error's first line, for a log line."""
    return repr(error).splitlines()[0][:200]

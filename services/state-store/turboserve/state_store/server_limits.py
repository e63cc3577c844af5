"""Limits that Postgres itself enforces: a process that is stopped ends none of its transactions."""

from __future__ import annotations

from typing import Any

import asyncpg

STATEMENT_SHARE = 0.8
"""Longest time of a statement and of its wait for a lock at the server, as a share of the transaction's."""

# Postgres before version 17 does not know this limit, and would refuse a connection that names it.
_LIMIT_TRANSACTIONS = (
    "select set_config(name, '{limit_ms}', false) from pg_settings where name = 'transaction_timeout'"
)


def connect_args(deadline_s: float) -> dict[str, Any]:
    """Return the arguments of connections whose transactions take at most `deadline_s`."""
    limit_ms = str(int(deadline_s * 1000))
    # A server that works answers before the transaction's deadline, which ends the connection.
    statement_ms = str(int(STATEMENT_SHARE * deadline_s * 1000))

    async def connect(*args: Any, **options: Any) -> Any:
        connection = await asyncpg.connect(*args, **options)
        try:
            # The driver prepares a statement in one message and executes it in the next one. If the process
            # is stopped in between, the statement has not begun, and the transaction does not count as idle.
            await connection.execute(_LIMIT_TRANSACTIONS.format(limit_ms=limit_ms), timeout=deadline_s)
        except BaseException:
            connection.terminate()
            raise
        return connection

    return {
        "async_creator_fn": connect,
        "timeout": deadline_s,
        "server_settings": {
            "application_name": "turboserve-state-store",
            "statement_timeout": statement_ms,
            "lock_timeout": statement_ms,
            # A stopped process that holds a lock must not block the other processes forever.
            "idle_in_transaction_session_timeout": limit_ms,
            # Nor must a machine that vanishes while it holds a lock.
            "tcp_keepalives_idle": "5",
            "tcp_keepalives_interval": "3",
            "tcp_keepalives_count": "3",
        },
    }

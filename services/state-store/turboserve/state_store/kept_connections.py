"""Connections that a pool keeps, and their end when Postgres stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import event, exc
from sqlalchemy.ext.asyncio import AsyncEngine


class KeptConnections:
    """Connections of an engine's pool.

    On SIGTERM, Postgres waits until its clients have disconnected, and refuses new connections meanwhile. It
    would wait forever for connections that a pool keeps, and its supervisor could not start it again.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._idle: set[Any] = set()
        """Connections of the driver that no transaction uses."""
        self._disconnects = 0
        event.listen(engine.sync_engine, "connect", self._connected)
        event.listen(engine.sync_engine, "checkout", self._checked_out)
        event.listen(engine.sync_engine, "checkin", self._checked_in)
        event.listen(engine.sync_engine, "close", self._closed)

    def disconnect(self) -> None:
        """Close all connections: idle ones at once, those in use after their transaction."""
        self._disconnects += 1
        self.disconnect_idle()

    def disconnect_idle(self) -> None:
        """Close idle connections. One in use has failed, and the server may have left the others, too.

        SQLAlchemy does the same with its pool, but does not see errors of the driver's own connection.
        """
        while self._idle:
            self._idle.pop().terminate()

    def ended(self) -> Callable[[], bool]:
        """Return whether, since this call, connections must be closed. For one that is in use for long."""
        before = self._disconnects
        return lambda: self._disconnects != before

    def _connected(self, _connection: Any, record: Any) -> None:
        record.info["disconnects"] = self._disconnects

    def _checked_out(self, connection: Any, _record: Any, _proxy: Any) -> None:
        self._idle.discard(connection.driver_connection)
        # The driver knows without a round trip that the connection is closed.
        if connection.driver_connection.is_closed():
            raise exc.DisconnectionError

    def _checked_in(self, connection: Any, record: Any) -> None:
        if connection is None:
            return
        if record.info["disconnects"] == self._disconnects:
            self._idle.add(connection.driver_connection)
        else:
            connection.driver_connection.terminate()

    def _closed(self, connection: Any, _record: Any) -> None:
        self._idle.discard(connection.driver_connection)

"""One session at the server: its transaction, its locks, and the statement that is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

from turboserve.contracts.errors import ConflictError
from turboserve.simulation.runtime.process import Process
from turboserve.simulation.runtime.rows.locks import LockMode, LockTable
from turboserve.simulation.runtime.rows.tables import Table, Tables
from turboserve.state_store.ports.database import unavailable

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BlockedError(Exception):
    """The statement must wait for a lock. It runs again from its beginning once it has the lock."""

    def __init__(self, key: Hashable, mode: LockMode) -> None:
        super().__init__(key, mode)
        self.key, self.mode = key, mode


class StatementServer(Protocol):
    """The server as its sessions use it."""

    loop: asyncio.AbstractEventLoop
    tables: Tables
    locks: LockTable

    def send(self, session: Session, run: Callable[[], T], future: asyncio.Future[T]) -> None:
        """Send a statement to the server. Its result resolves `future`."""

    def commit(self, session: Session) -> None:
        """Commit the session's transaction. Called by statements."""

    def roll_back(self, session: Session) -> None:
        """Roll the session's transaction back."""

    def check_disk(self, *, inserts: bool) -> None:
        """Check that the disk has space for a write. Called by statements."""


class Session:
    """A client's session. Its statements are functions that run at the server.

    Statements read what is committed and what their transaction has written. A statement that must wait for a
    lock runs again from its beginning once it has the lock.
    """

    def __init__(
        self,
        server: StatementServer,
        process: Process | None,
        *,
        deadline: float,
        idle_limit_s: float,
        lock_limit_s: float,
        autocommit: bool,
        durable: bool,
    ) -> None:
        """Create a session.

        Args:
            deadline: Loop time at which the client gives the session up.
            autocommit: Whether each statement is a transaction.
        """
        self.server, self.process = server, process
        self.tables: Tables = server.tables
        self.deadline, self.idle_limit_s, self.lock_limit_s = deadline, idle_limit_s, lock_limit_s
        self.autocommit, self.durable = autocommit, durable
        self.locks: dict[Hashable, LockMode] = {}
        self.writes: dict[Table[Any, Any], dict[Any, Any]] = {}
        """By table and key: the row after this transaction, None if deleted."""
        self.journal: list[tuple[dict[Any, Any], Any, bool, Any]] = []
        """Values in `writes` that the statement has replaced."""
        self.opened = False
        """Whether the server has received a statement."""
        self.closed = False
        """Whether the client no longer uses the session, or cannot."""
        self.abandoned = False
        """Whether the client closed the session or died."""
        self.ended = False
        """Whether the server has ended the session. Statements already sent are not executed."""
        self.kept: set[Hashable] = set()
        """Advisory locks that outlast their transaction."""
        self.failed = False
        """Whether a statement failed, so that the transaction can only be rolled back."""
        self.idle_since: float | None = None
        """Time since which the server waits for the next statement; None while one is under way."""
        self.pending: asyncio.Future[Any] | None = None
        self.committing = False
        self._owed_s = 0.0

    # At the client

    async def execute(self, run: Callable[[], T]) -> T:
        """Execute `run` at the server, in one round trip.

        Raises UnavailableError, and the errors of `run`.
        """
        if self.process is not None:
            self.process.check_alive()
        if self.closed or self.failed:
            raise unavailable()
        future: asyncio.Future[T] = self.server.loop.create_future()
        self.pending = future
        self.idle_since = None
        self.server.send(self, run, future)
        return await future

    def owe(self, seconds: float) -> float:
        """Return the time of a statement that alone takes `seconds`: see `PostgresBehavior.at_commit`."""
        self._owed_s += seconds
        if not (self.committing or self.autocommit):
            return 0.0
        owed_s, self._owed_s = self._owed_s, 0.0
        return owed_s

    async def lock_or_insert(self, table: Table[K, V], key: K, first: V) -> V:
        """Lock the row and return it. A missing row is inserted as `first`, in round trips of their own."""
        row = await self.execute(lambda: self.lock(table, key))
        if row is None:
            await self.execute(lambda: self.insert_if_absent(table, key, first))
            row = await self.execute(lambda: self.lock(table, key))
        assert row is not None
        return row

    async def commit(self) -> None:
        """Commit the transaction. After UnavailableError, the outcome is unknown."""
        if not self.opened and not self.closed:
            return
        if self.failed:
            self.abandon()
            return
        self.committing = True
        await self.execute(self._commit)
        self.closed = True

    def abandon(self) -> None:
        """Close the connection. A commit or an autocommit statement still runs if it was sent."""
        if self.closed:
            return
        self.closed = self.abandoned = True
        sent = self.pending is not None and (self.committing or self.autocommit)
        if self.opened and not sent:
            self.server.roll_back(self)

    def _commit(self) -> None:
        self.server.commit(self)

    # At the server: called by statements

    def get(self, table: Table[K, V], key: K) -> V | None:
        """Return the row as this statement sees it."""
        if self.writes:
            written = self.writes.get(table)
            if written is not None and key in written:
                row: V | None = written[key]
                return row
        return table.rows.get(key)

    def find(self, table: Table[K, V], index: str, value: Hashable) -> list[tuple[K, V]]:
        """Return keys and rows that have `value`, in no particular order."""
        keys = table.keys(index, value)
        written = self.writes.get(table) if self.writes else None
        if not written:
            return [(key, table.rows[key]) for key in keys]
        found = [(key, table.rows[key]) for key in keys if key not in written]
        value_of = table.indexes[index]
        found += [(key, row) for key, row in written.items() if row is not None and value_of(row) == value]
        return found

    def all(self, table: Table[K, V]) -> list[tuple[K, V]]:
        """Return all keys and rows, in no particular order."""
        written = self.writes.get(table) if self.writes else None
        if not written:
            return list(table.rows.items())
        found = [(key, row) for key, row in table.rows.items() if key not in written]
        return found + [(key, row) for key, row in written.items() if row is not None]

    def lock(self, table: Table[K, V], key: K, mode: LockMode = LockMode.UPDATE) -> V | None:
        """Lock the row and read it again. Returns None, and takes no lock, if the row does not exist."""
        row = self.get(table, key)
        if row is None:
            return None
        self.take((table.name, key), mode)
        return self.get(table, key)

    def take(self, key: Hashable, mode: LockMode = LockMode.UPDATE) -> None:
        """Take a lock by its name, or wait for it."""
        if not self.server.locks.take(self, key, mode):
            raise BlockedError(key, mode)

    def take_free(self, key: Hashable) -> bool:
        """Take a lock by its name unless another session holds it, as `skip locked`."""
        return self.server.locks.take(self, key, LockMode.UPDATE)

    def update(self, table: Table[K, V], key: K, row: V) -> None:
        """Replace an existing row."""
        self.take((table.name, key), LockMode.NO_KEY_UPDATE)
        self.server.check_disk(inserts=False)
        self._write(table, key, row)

    def insert(self, table: Table[K, V], key: K, row: V) -> None:
        """Insert a row. Raises ConflictError if the key, or a value that must be unique, already exists."""
        if not self.insert_if_absent(table, key, row):
            raise ConflictError(f"another request did this first: {table.name} has {key}")

    def insert_if_absent(self, table: Table[K, V], key: K, row: V) -> bool:
        """Insert as `on conflict do nothing` on the key. Returns False if the key exists.

        Waits for another transaction that has inserted the key and not ended.
        """
        if self.get(table, key) is not None:
            return False
        self.take((table.name, key))
        if self.get(table, key) is not None:
            return False
        for index in table.unique:
            value = table.indexes[index](row)
            if value is not None:
                self.take((table.name, index, value))
                if self.find(table, index, value):
                    raise ConflictError(f"another request did this first: {table.name} has {value}")
        self.server.check_disk(inserts=True)
        self._write(table, key, row)
        return True

    def delete(self, table: Table[K, V], key: K) -> bool:
        """Delete the row. Returns whether it existed."""
        if self.lock(table, key) is None:
            return False
        self._write(table, key, None)
        return True

    def _write(self, table: Table[K, V], key: K, row: V | None) -> None:
        written = self.writes.setdefault(table, {})
        self.journal.append((written, key, key in written, written.get(key)))
        written[key] = row

    def undo_statement(self) -> None:
        """Revert what the statement has written so far; its locks stay."""
        for written, key, known, before in reversed(self.journal):
            if known:
                written[key] = before
            else:
                del written[key]
        self.journal.clear()

    def refer(self, table: Table[K, V], key: K) -> None:
        """Check a foreign key to a row. Raises ConflictError if the row does not exist."""
        if self.lock(table, key, LockMode.KEY_SHARE) is None:
            raise ConflictError(f"another request did this first: {table.name} has no {key}")

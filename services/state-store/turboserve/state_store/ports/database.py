"""The database as the services see it: transactions with a deadline, locks, and typed errors."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from turboserve.contracts.errors import UnavailableError
from turboserve.state_store.ports.deployment import (
    ClockRepository,
    CorrectionRepository,
    LeaderRepository,
    OutboxRepository,
    PoolRepository,
    RentalRepository,
    WorkerRepository,
)
from turboserve.state_store.ports.sessions import (
    AdmissionRepository,
    ChangeRepository,
    ControlRepository,
    FenceRepository,
    ProgressRepository,
    SessionRepository,
    TenantRepository,
)

RETRY_AFTER_S = 1.0
LOCK_ANSWER_S = 3.0
"""A session lock's connection that does not answer for this long is given up."""
LOCK_SILENCE_S = 5.0
"""The server ends a session lock's connection after this much silence: its holder is stopped."""


def unavailable() -> UnavailableError:
    """What a transaction raises that failed through no fault of its own."""
    return UnavailableError("the database does not answer at the moment", retry_after_s=RETRY_AFTER_S)


class StatementError(Exception):
    """The database refuses a statement for good: a mistake of the program, not an outage."""


class UnitOfWork(Protocol):
    """The repositories inside one transaction."""

    @property
    def admission(self) -> AdmissionRepository: ...
    @property
    def changes(self) -> ChangeRepository: ...
    @property
    def clocks(self) -> ClockRepository: ...
    @property
    def controls(self) -> ControlRepository: ...
    @property
    def corrections(self) -> CorrectionRepository: ...
    @property
    def fence(self) -> FenceRepository: ...
    @property
    def leaders(self) -> LeaderRepository: ...
    @property
    def outbox(self) -> OutboxRepository: ...
    @property
    def pools(self) -> PoolRepository: ...
    @property
    def progress(self) -> ProgressRepository: ...
    @property
    def rentals(self) -> RentalRepository: ...
    @property
    def sessions(self) -> SessionRepository: ...
    @property
    def tenants(self) -> TenantRepository: ...
    @property
    def workers(self) -> WorkerRepository: ...

    async def make_durable(self) -> None:
        """Let a transaction that began with `durable=False` wait for the disk after all."""


class SessionLock(Protocol):
    """An advisory lock of the database that its holder's connection holds, without a transaction."""

    async def acquire(self) -> bool:
        """Take the lock; False if another connection has it. Raises `UnavailableError`."""

    async def confirm(self) -> None:
        """Raises `UnavailableError` if the connection is lost, and the lock with it."""


class Database(Protocol):
    """Postgres. Isolation is read committed. A row that a transaction has written stays locked until its
    end."""

    @property
    def reachable(self) -> bool:
        """What the last `ping` found."""

    def transaction(self, *, durable: bool = True) -> AbstractAsyncContextManager[UnitOfWork]:
        """One transaction, committed at the end of the block and rolled back if that raises.

        `durable=False` does not wait for the disk: for what a crash of Postgres may take back. Raises
        `UnavailableError` within the deadline when Postgres is down, slow or restarting, and `ConflictError`
        when another transaction inserted the same thing first. After `UnavailableError` the outcome of a
        commit is unknown.
        """

    def statement(self) -> AbstractAsyncContextManager[UnitOfWork]:
        """For a single statement, which commits itself: two round trips less. Raises as `transaction`."""

    def exclusive(self, key: int) -> AbstractAsyncContextManager[UnitOfWork]:
        """Statements, each of which commits itself, by one holder of the advisory lock `key` at a time.

        No transaction is open between the statements, so the block may wait for other servers: it holds no
        row. Waits for the lock. The lock is given up when the block ends, the process dies or the transaction
        deadline passes, and by the server if the connection is silent for that long. Raises as `transaction`.
        """

    def session_lock(self, key: int) -> AbstractAsyncContextManager[SessionLock]:
        """A connection that may hold the advisory lock `key` for as long as the block runs. The server gives
        the lock up if the connection is silent for `LOCK_SILENCE_S`. Raises `UnavailableError`."""

    async def migrate(self) -> None:
        """Bring the schema up to date. Raises `UnavailableError` if there is no server or no database yet."""

    async def ping(self) -> bool:
        """Write something; whether that worked is also kept in `reachable`. Never raises for a server that is
        away or whose disk is full."""

    async def close(self) -> None:
        """Give up all connections."""

"""The port of the database: transactions with a deadline, locks, and typed errors."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from turboserve.contracts.errors import UnavailableError
from turboserve.state_store.ports.audit import AuditRepository
from turboserve.state_store.ports.deployment import (
    ClockRepository,
    CorrectionRepository,
    LeaderRepository,
    OutboxRepository,
    PoolRepository,
    RentalRepository,
    WorkerRepository,
)
from turboserve.state_store.ports.keys import KeyRepository
from turboserve.state_store.ports.links import LinkRepository
from turboserve.state_store.ports.pool_history import PoolHistoryRepository
from turboserve.state_store.ports.recordings import RecordingRepository
from turboserve.state_store.ports.sessions import (
    AdmissionRepository,
    ChangeRepository,
    ControlRepository,
    FenceRepository,
    PlacementRepository,
    ProgressRepository,
    SessionRepository,
    TenantRepository,
)
from turboserve.state_store.ports.webhooks import WebhookRepository

RETRY_AFTER_S = 1.0
ADMISSIONS = 2
"""Transactions of one process that admit and have a connection. One holds the lock of admission, and one is
next. Further ones would only keep connections from other requests while they wait for the lock."""
TURN_SHARE = 0.8
"""Longest wait for a turn among those that admit, as a share of the transaction's deadline. So a turn leaves
time to use it."""
LOCK_ANSWER_SHARE = 0.6
"""Share of `silence_s` after which the connection of a session lock is lost if it does not answer."""


def unavailable(*, answered: bool = False) -> UnavailableError:
    """Return the error of a transaction that may succeed later.

    `answered`: the database refused a statement. Otherwise the connection failed, or the time was over.
    """
    error = UnavailableError("the database does not answer", retry_after_s=RETRY_AFTER_S)
    error.answered = answered
    return error


class StatementError(Exception):
    """The database refuses a statement permanently: a mistake of the program, not an outage."""


class UnitOfWork(Protocol):
    """The repositories inside one transaction."""

    @property
    def admission(self) -> AdmissionRepository: ...
    @property
    def audit(self) -> AuditRepository: ...
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
    def keys(self) -> KeyRepository: ...
    @property
    def leaders(self) -> LeaderRepository: ...
    @property
    def links(self) -> LinkRepository: ...
    @property
    def outbox(self) -> OutboxRepository: ...
    @property
    def placements(self) -> PlacementRepository: ...
    @property
    def pool_history(self) -> PoolHistoryRepository: ...
    @property
    def pools(self) -> PoolRepository: ...
    @property
    def progress(self) -> ProgressRepository: ...
    @property
    def recordings(self) -> RecordingRepository: ...
    @property
    def rentals(self) -> RentalRepository: ...
    @property
    def sessions(self) -> SessionRepository: ...
    @property
    def tenants(self) -> TenantRepository: ...
    @property
    def webhooks(self) -> WebhookRepository: ...
    @property
    def workers(self) -> WorkerRepository: ...

    async def make_durable(self) -> None:
        """Make a transaction that began with `durable=False` wait for the disk."""


class SessionLock(Protocol):
    """An advisory lock of the database that a connection holds without a transaction."""

    async def acquire(self) -> bool:
        """Take the lock; False if another connection has it. Raises `UnavailableError`."""

    async def confirm(self) -> None:
        """Raise `UnavailableError` if the connection is lost, and the lock with it."""


class Database(Protocol):
    """Postgres. Isolation is read committed. A written row stays locked until the transaction ends."""

    @property
    def reachable(self) -> bool:
        """Whether the last `ping` succeeded."""

    def transaction(
        self, *, durable: bool = True, admits: bool = False
    ) -> AbstractAsyncContextManager[UnitOfWork]:
        """Open a transaction, which is committed at the end of the block and rolled back if the block raises.

        With `durable=False` the commit does not wait for the disk, and a crash of Postgres may undo it. With
        `admits=True` it begins with the lock of admission: only one such transaction at a time counts and
        admits, so that two never take the same last place.

        Raises `UnavailableError` within the deadline if Postgres is down, slow or restarting, and
        `ConflictError` if another transaction inserted the same row first. After `UnavailableError`, the
        outcome of a commit is unknown.
        """

    def statement(self) -> AbstractAsyncContextManager[UnitOfWork]:
        """Run a single statement, which commits itself. Saves two round trips. Raises as `transaction`."""

    def exclusive(self, key: int) -> AbstractAsyncContextManager[UnitOfWork]:
        """Run statements, each of which commits itself, while holding the advisory lock `key`.

        Waits for the lock. No transaction is open between the statements and no row is locked, so the block
        may wait for other servers. The lock is released when the block ends, the process dies or the
        transaction deadline passes, and by the server if the connection is silent for that long. Raises as
        `transaction`.
        """

    def session_lock(self, key: int, silence_s: float) -> AbstractAsyncContextManager[SessionLock]:
        """Open a connection that may hold the advisory lock `key` during the block.

        The server ends the connection, and so releases the lock, if it is silent for `silence_s`: its holder
        is stopped. Raises `UnavailableError`.
        """

    async def migrate(self) -> None:
        """Bring the schema up to date. Raises `UnavailableError` if there is no server or no database yet."""

    async def ping(self) -> bool:
        """Write something, return whether that worked, and keep the result in `reachable`.

        Never raises for a server that is away or whose disk is full.
        """

    async def close(self) -> None:
        """Close all connections."""

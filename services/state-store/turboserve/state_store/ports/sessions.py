"""Repositories of sessions, and of the rows that belong to them.

Arguments and results are the contracts' records. All raise `UnavailableError` if the database does not answer
in time, and `ConflictError` if another transaction has inserted the same row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from turboserve.contracts.requests import CreateSession, ListSessions
from turboserve.contracts.sessions import Decision, SessionRecord
from turboserve.contracts.workers import Incoming, MigrationKey
from turboserve.state_store.core.change import Change
from turboserve.state_store.core.forecast import Outlook
from turboserve.state_store.core.receipts import Receipt, SettledControl
from turboserve.state_store.core.session_spans import SessionTimes
from turboserve.state_store.core.tenants import Tenant
from turboserve.state_store.ports.records import (
    AdmissionCounts,
    LockedPlacement,
    LogProgress,
    SessionRow,
    UsageShare,
    ViewerUse,
    WorkerSessions,
)


class SessionRepository(Protocol):
    async def get(self, session: str) -> SessionRecord | None: ...

    async def get_row(self, session: str, *, lock: bool = False) -> SessionRow | None:
        """Return the row. With `lock`, no other transaction changes the row until this one ends."""

    async def created_by(self, request: CreateSession) -> bool:
        """Return whether an equal request created the row with this id."""

    async def page(self, request: ListSessions, before: int | None) -> list[tuple[int, SessionRecord]]:
        """Return sessions with their numbers, newest first; one more than the limit, if there are more."""

    async def suspended_since(self, before: float, limit: int) -> list[SessionRecord]:
        """Return sessions suspended and unchanged since `before`, the longest first."""

    async def of_workers(
        self, held: Mapping[str, Collection[str]]
    ) -> Callable[[], dict[str, WorkerSessions]]:
        """Read what the renewals of these workers list. `held`: sessions that each worker holds.

        Returns a function that parses the rows, for the time when the connection is free again.
        """

    async def migration_keys(self, worker: str, session: str | None = None) -> tuple[MigrationKey, ...]:
        """Return the keys of live migrations from or to this worker; with `session`, only its key."""

    async def migrating_to(self, worker: str) -> list[Incoming]:
        """Return all sessions that migrate to this worker, oldest first, with their sources' addresses."""


class ChangeRepository(Protocol):
    async def create(self, change: Change, tenant: Tenant | None = None) -> None:
        """Insert the row and its events. Replace the row of `tenant`, whose lock the caller holds.

        The caller holds the admission lock and found no row of this id.
        """

    async def write(
        self, change: Change, *, migration_key: str | None = None, tenant: Tenant | None = None
    ) -> None:
        """Write the changed fields, the events in their order and the decision.

        The caller holds the row's lock and has compared its version. `migration_key` is the key of the
        migration that the change begins. A change that ends a migration erases its key. `tenant`: as in
        `create`.
        """


class PlacementRepository(Protocol):
    async def lock(self, leader: str, worker: str, session: str) -> LockedPlacement:
        """Hold the leader's term, lock the worker's row, and then the session's, in one statement.

        All transactions that hold a term lock it first, then workers, then sessions. Each row is read as it
        is once it is locked. A row that was inserted while the statement waited for a lock may be missing.
        """


class FenceRepository(Protocol):
    async def store(self, session: str, epoch: int, revision: int) -> SessionRecord | None:
        """Write that `own` of `epoch` has `revision`.

        Returns the row; None if it has another epoch, or knows this revision or a greater one.
        """

    async def store_seen(self, session: str, epoch: int, revision: int) -> None:
        """Write a revision that was found in the log, if the row is at `epoch` and knows no greater one."""

    async def newest(self) -> int:
        """Return the greatest revision of all sessions, past ones included; 0 if there is none."""

    async def reopen(self, session: str, epoch: int, stored: int) -> bool:
        """Mark the fence of `epoch` as missing, because the log has lost revision `stored`.

        Raises the row's version, so that the worker accepts the new revision, and `log_losses`, so that the
        worker notices the loss whichever rows it misses. Returns False if the row has another epoch or
        revision.
        """

    async def missing(self, limit: int) -> Sequence[str]:
        """Return sessions whose current epoch is not in the log, by their rows."""

    async def settled(self) -> Sequence[tuple[str, int, int]]:
        """Return (session, epoch, revision) of all live sessions whose fence is in the log, by their rows."""


class ProgressRepository(Protocol):
    async def position(self, cursor: str) -> int:
        """Return the stream sequence up to which all entries are counted; 0 at first."""

    async def move(self, cursor: str, before: int, after: int) -> bool:
        """Move the position from `before` to `after`. False: the position is not `before`."""

    async def count(self, reached: Sequence[LogProgress]) -> dict[str, SessionRecord]:
        """Write the progress of sessions, whose counts never decrease. Returns the existing rows after it."""

    async def add_usage(self, hour: int, shares: Iterable[UsageShare]) -> None:
        """Add chunks and what viewers have used to the usage of `hour`, and of its day."""

    async def add_viewer_use(self, hour: int, used: Mapping[str, ViewerUse]) -> None:
        """Add what viewers have used in `hour`, by session. Those without a row are left out."""

    async def number_events(self, session: str, event_sequence: int) -> None:
        """Write the number of the session's newest event. The caller holds the row's lock."""

    async def unpurged(self, ended_before: float, limit: int) -> Sequence[str]:
        """Return sessions whose chunks are due to be removed from the log, longest ended first."""

    async def unknown(self, ids: Sequence[str]) -> Sequence[str]:
        """Return those of `ids` that have no row."""

    async def mark_purged(self, ids: Iterable[str], now: float) -> None: ...

    async def delete_ended(self, ended_before: float, limit: int) -> int:
        """Delete up to `limit` rows whose chunks are purged from the log, longest ended first.

        Also deletes their controls and decisions, and subtracts their bytes from the tenants' stored bytes.
        Returns the number of deleted rows.
        """


class ControlRepository(Protocol):
    async def insert(self, receipt: Receipt) -> None: ...

    async def receipt(self, receipt_id: str) -> Receipt | None:
        """Return the receipt of a prompt or a control. No two have one id."""

    async def settle(
        self, session: str, control_seq: int, chunk_index: int, now: float
    ) -> list[SettledControl]:
        """Settle what no chunk has settled before, up to `control_seq`. Returns it in order.

        The chunk applies the newest prompt and the newest value of each control. They supersede the others.
        """

    async def decided(self, record: SessionRecord, version: int, worker: str) -> bool:
        """Return whether placing the session on `worker` made the row's `version` and its current epoch."""

    async def migrated(self, record: SessionRecord, migration: int) -> bool:
        """Return whether committing this migration made the row's current epoch."""

    async def note(self, decision: Decision) -> None:
        """Keep a decision that changes no row. A repetition of the last one replaces its numbers and time."""

    async def decisions_of(self, session: str, limit: int) -> list[Decision]:
        """Return the newest decisions, in the order in which they were made."""


class TenantRepository(Protocol):
    async def lock(self, tenant: str) -> Tenant:
        """Lock the row until this transaction ends, and return it. Creates a missing row."""

    async def write(self, tenant: Tenant) -> None:
        """Replace the row; the caller holds its lock."""

    async def delete_unused(self, before: float) -> int:
        """Delete rows that store nothing and whose buckets were full before `before`. Returns how many."""


class AdmissionRepository(Protocol):
    async def census(
        self,
        session: str,
        model: str,
        tenant: str,
        *,
        renewed_after: float,
        known_after: float,
        locks_tenant: bool = False,
    ) -> AdmissionCounts:
        """Count in one statement. A worker counts if it takes sessions and renewed after `renewed_after`.

        A worker that a pool may still start counts as well, with the largest capacity of the model's workers.
        With `locks_tenant`, an existing row of the tenant is locked. The counts are of the moment before.
        """

    async def outlook(self, model: str, *, since: float, renewed_after: float) -> Outlook:
        """Count what will free slots of a model. Sessions count that have left after `since`.

        Sessions whose chunks are removed already do not count.
        """

    async def session_times(self, model: str, *, since: float) -> tuple[SessionTimes, ...] | None:
        """List the sessions that live, and the last ones that have left after `since`, by id.

        None: more than `LIVE_LIMIT` live.
        """

    async def slots_used(self, worker: str, *, besides: str) -> int:
        """Count sessions, except `besides`, that hold a slot of this worker or reserve one by migrating."""

    async def slots_by_class(self, worker: str, *, besides: str) -> dict[str, int]:
        """As `slots_used`, by class."""

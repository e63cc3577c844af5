"""Repositories of sessions, and of what hangs on them.

Arguments and results are the contracts' records. All raise `UnavailableError` if the database does not answer
in time, and `ConflictError` if another transaction has inserted the same thing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from turboserve.contracts.requests import CreateSession, ListSessions
from turboserve.contracts.sessions import Decision, PromptReceipt, SessionRecord
from turboserve.contracts.workers import Incoming, MigrationKey
from turboserve.state_store.core.change import Change
from turboserve.state_store.core.tenants import Tenant
from turboserve.state_store.ports.records import AdmissionCounts, LogProgress, SessionRow


class SessionRepository(Protocol):
    async def get(self, session: str) -> SessionRecord | None: ...

    async def get_row(self, session: str, *, lock: bool = False) -> SessionRow | None:
        """With `lock`: no other transaction changes it until this one ends."""

    async def created_by(self, request: CreateSession) -> bool:
        """Whether the row of this id was made by this very request."""

    async def page(self, request: ListSessions, before: int | None) -> list[tuple[int, SessionRecord]]:
        """Newest first, each with its number; one more than the limit, to show if there is more."""

    async def suspended_since(self, before: float, limit: int) -> list[SessionRecord]:
        """Suspended and unchanged since `before`, the longest first."""

    async def assigned(self, worker: str, held: Collection[str]) -> list[SessionRecord]:
        """All that have not ended and name this worker, oldest first.

        Suspended sessions are listed if they are in `held`, or if they migrate: their target asks this worker
        for the state, and this worker has to answer if there is none.
        """

    async def migration_keys(self, worker: str, session: str | None = None) -> tuple[MigrationKey, ...]:
        """Keys of the live migrations from or to this worker; with `session`, of that one alone."""

    async def moving_to(self, worker: str) -> list[Incoming]:
        """All that are moving to this worker, oldest first, with the addresses of where they are."""


class ChangeRepository(Protocol):
    async def create(self, change: Change) -> None:
        """Insert the row and the events; the caller holds the admission lock and found no row of this id."""

    async def write(self, change: Change, *, migration_key: str | None = None) -> None:
        """Write what changes, the events in their order and the decision; the caller holds the row's lock and
        has compared its version.

        `migration_key` is that of the move which the change begins. A change that ends a move erases its key.
        """


class FenceRepository(Protocol):
    async def store(self, session: str, epoch: int, revision: int) -> SessionRecord | None:
        """Note that `own` of `epoch` has `revision`; None if the row is at another epoch by now."""

    async def store_seen(self, session: str, epoch: int, revision: int) -> None:
        """Note the revision that the log was found at while the row was at `epoch`."""

    async def reopen(self, session: str, epoch: int, stored: int, actual: int) -> bool:
        """The log has lost `own` of `epoch`, which the row says is at `stored`: it is to be written again.

        The version is raised, so that the worker takes the new revision for news.

        Returns False if the row says otherwise.
        """

    async def missing(self, limit: int) -> Sequence[str]:
        """Sessions whose current epoch is not in the log, as far as the row says."""

    async def settled(self) -> Sequence[tuple[str, int, int]]:
        """(session, epoch, revision) of all that have not ended and whose fence is said to be in the log."""


class ProgressRepository(Protocol):
    async def position(self, cursor: str) -> int:
        """The stream sequence up to which everything is counted; 0 at first."""

    async def move(self, cursor: str, before: int, after: int) -> bool:
        """Move the position from `before` to `after`; False if it is not there any more."""

    async def count(self, reached: Sequence[LogProgress]) -> dict[str, SessionRecord]:
        """Note how far the log has come, never backwards; the rows after it, of those that are there."""

    async def unpurged(self, ended_before: float, limit: int) -> Sequence[str]:
        """Sessions whose chunks are due to be removed from the log, longest ended first."""

    async def unknown(self, ids: Sequence[str]) -> Sequence[str]:
        """Those of `ids` for which there is no row."""

    async def mark_purged(self, ids: Iterable[str], now: float) -> None: ...

    async def delete_ended(self, ended_before: float, limit: int) -> int:
        """Delete rows whose chunks are gone from the log, longest ended first, at most `limit`; how many.

        Controls and decisions go with them. Their tenants' stored bytes become fewer by theirs.
        """


class ControlRepository(Protocol):
    async def insert_prompt(self, receipt: PromptReceipt) -> None: ...

    async def prompt_of_event(self, event_id: str) -> PromptReceipt | None: ...

    async def mark_applied(
        self, session: str, control_seq: int, chunk_index: int, now: float
    ) -> list[PromptReceipt]:
        """Note which chunk applied the prompts up to `control_seq`; those that none had applied, in order."""

    async def decided(self, record: SessionRecord, version: int, worker: str) -> bool:
        """Whether the row's `version` was made by placing it on `worker`, under the epoch it still has."""

    async def moved(self, record: SessionRecord, move: int) -> bool:
        """Whether the epoch that the row still has was made by committing this move."""

    async def note(self, decision: Decision) -> None:
        """Keep a decision that changes no row. One that repeats the last replaces its numbers and time."""

    async def decisions_of(self, session: str, limit: int) -> list[Decision]:
        """The newest, in the order in which they were made."""


class TenantRepository(Protocol):
    async def lock(self, tenant: str) -> Tenant:
        """The row, which no other transaction changes until this one ends; it is made if it is not there."""

    async def write(self, tenant: Tenant) -> None:
        """Replace the row; the caller holds its lock."""

    async def delete_unused(self, before: float) -> int:
        """Delete rows that store nothing and whose buckets were full `before`; how many."""


class AdmissionRepository(Protocol):
    async def lock(self) -> None:
        """Let one transaction at a time count and admit, so that two never take the same last place."""

    async def census(
        self, session: str, model: str, tenant: str, *, renewed_after: float, known_after: float
    ) -> AdmissionCounts:
        """Counted in one statement. A worker counts if it takes sessions and renewed after `renewed_after`.

        So does one that a pool may still start, with the places that the model's workers have had.
        """

    async def slots_used(self, worker: str, *, besides: str) -> int:
        """Sessions other than `besides` that hold a slot of this worker, or reserve one by moving there."""

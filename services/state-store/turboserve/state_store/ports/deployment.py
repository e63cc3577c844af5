"""Repositories of workers, leaders, events, pools and cost. As `ports.sessions`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from turboserve.contracts.cost import Correction, Cost, PoolCost, SessionCost
from turboserve.contracts.events import Event
from turboserve.contracts.leading import LeaderRecord
from turboserve.contracts.pool import PoolOrders, PoolReport
from turboserve.contracts.workers import WorkerRecord
from turboserve.state_store.core.aging import Aging
from turboserve.state_store.core.rentals import RentalRow
from turboserve.state_store.ports.records import PendingEvent


class WorkerRepository(Protocol):
    async def get(self, worker: str, *, lock: bool = False) -> WorkerRecord | None: ...

    async def insert(self, record: WorkerRecord) -> bool:
        """False if there is a row of this id already."""

    async def write(self, record: WorkerRecord, *, gone_at: float | None = None) -> None:
        """Replace the row; the caller holds its lock."""

    async def page(self, *, include_gone: bool) -> list[WorkerRecord]:
        """All that are there, oldest first, each with its counts of sessions; then `GONE_LISTED` gone ones,
        those that went last."""

    async def delete_gone(self, gone_before: float) -> int:
        """Delete rows of workers long gone that no session names."""


class LeaderRepository(Protocol):
    async def get(self, name: str) -> LeaderRecord:
        """The row as it is; one without a holder if there has been no leader yet."""

    async def share(self, name: str) -> LeaderRecord:
        """The row, whose term cannot change before this transaction ends; renewals go on meanwhile."""

    async def lock(self, name: str, *, new_term: bool) -> LeaderRecord:
        """The row, for a renewal or (`new_term`) for a change of term; it is made if it is not there."""

    async def write(self, record: LeaderRecord) -> None:
        """Replace the row; the caller holds its lock."""


class OutboxRepository(Protocol):
    async def add(self, events: Iterable[Event]) -> None:
        """Write the events of a change with the change itself."""

    async def oldest(self, limit: int) -> Sequence[PendingEvent]:
        """In the order of their numbers."""

    async def remove(self, numbers: Iterable[int]) -> None:
        """Delete these rows, without waiting for the disk: an event that a crash of Postgres brings back is
        published again under the same message id, which the log recognizes."""

    async def backlog(self) -> tuple[int, float | None]:
        """How many wait, and since when the oldest does (wall-clock seconds)."""


class PoolRepository(Protocol):
    async def reported(self, report: PoolReport, now: float) -> PoolOrders:
        """Note what the pool says; its orders."""

    async def processes(self, pool: str) -> tuple[str | None, tuple[str, ...]]:
        """The process that reports for the pool, and those that it has replaced. Locks the row, if there is
        one."""

    async def replaced(self, pool: str, process: str, former: tuple[str, ...]) -> None:
        """Note which process reports for the pool now."""

    async def get(self, pool: str, *, lock: bool = False) -> PoolOrders | None: ...

    async def write(self, orders: PoolOrders, changed: Collection[str]) -> None:
        """Write the orders named in `changed`, and the version; the caller holds the row's lock."""


class RentalRepository(Protocol):
    async def lock(self) -> None: ...

    async def of_pool(self, pool: str, named: Collection[str]) -> dict[str, RentalRow]:
        """The pool's open rentals, and those of the workers `named`."""

    async def beside_workers(self) -> list[tuple[RentalRow | None, WorkerRecord]]:
        """Each worker that is there, or whose rental is open, with its rental."""

    async def put(self, rows: Iterable[RentalRow]) -> None:
        """Write the rows as they are, but never how far shares have been given."""

    async def accrue(self) -> None:
        """Give the sessions that hold a slot now their shares of what has been paid since the last time."""

    async def by_kind(self) -> list[dict[str, Any]]:
        """Sums over all rentals, by kind."""

    async def by_pool(self) -> list[PoolCost]: ...

    async def used(self) -> Cost:
        """The sum of all sessions' shares, those of deleted ones included."""

    async def of_sessions(self, tenant: str | None, session: str | None, limit: int) -> list[SessionCost]:
        """Shares of a tenant's sessions, newest first; of one that has had no share yet: 0."""


class CorrectionRepository(Protocol):
    async def add(self, correction: Correction) -> Correction:
        """Write it; if its id is known, the row that has it, which stays as it is."""

    async def total(self, session: str | None = None) -> Cost:
        """The sum of all corrections, or of those of one session."""

    async def newest(self, tenant: str | None, limit: int) -> list[Correction]:
        """The newest ones; of a tenant, those of its sessions."""

    async def share(self, session: str) -> Cost | None:
        """What a session has been given; None: there never was one of this id."""


class ClockRepository(Protocol):
    async def get(self, name: str) -> Aging | None:
        """Locks the row, if there is one."""

    async def put(self, name: str, aging: Aging) -> None: ...

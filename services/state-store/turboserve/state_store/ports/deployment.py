"""Repositories of workers, leaders, events, pools and cost. For their errors, see `ports.sessions`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from turboserve.contracts.cost import Correction, Cost, PoolCost, SessionCost
from turboserve.contracts.events import Event
from turboserve.contracts.leading import LeaderRecord
from turboserve.contracts.pool import PoolOrders, PoolReport
from turboserve.contracts.usage import ListUsage, UsagePage
from turboserve.contracts.workers import WorkerRecord
from turboserve.state_store.core.aging import Aging
from turboserve.state_store.core.rentals import RentalRow
from turboserve.state_store.ports.records import PendingEvent


class WorkerRepository(Protocol):
    async def get(self, worker: str, *, lock: bool = False) -> WorkerRecord | None: ...

    async def lock_free(self, workers: Collection[str]) -> dict[str, WorkerRecord]:
        """Lock the rows that no other transaction has locked, and return them. Never waits for a lock."""

    async def insert(self, record: WorkerRecord) -> bool:
        """Insert the row. False: there is a row with this id already."""

    async def write(self, record: WorkerRecord, *, gone_at: float | None = None) -> None:
        """Replace the row; the caller holds its lock."""

    async def write_all(self, records: Sequence[WorkerRecord]) -> None:
        """Replace the rows of workers that are not gone, at once; the caller holds their locks."""

    async def write_renewed_at(self, times: Mapping[str, float]) -> None:
        """Write `renewed_at` of these workers; the caller holds the locks of their rows."""

    async def page(self, *, include_gone: bool) -> list[WorkerRecord]:
        """Return workers with their counts of sessions, oldest first.

        `include_gone` adds the last `GONE_LISTED` workers that were declared gone.
        """

    async def delete_gone(self, gone_before: float) -> int:
        """Delete rows of workers that were gone before `gone_before` and that own no live session."""


class LeaderRepository(Protocol):
    async def get(self, name: str) -> LeaderRecord:
        """Return the row; one without a holder if there has been no leader yet."""

    async def share(self, name: str) -> LeaderRecord:
        """Return the row and hold its term until this transaction ends. Renewals remain possible."""

    async def lock(self, name: str, *, new_term: bool) -> LeaderRecord:
        """Lock the row for a renewal or (`new_term`) for a change of term. Creates a missing row."""

    async def write(self, record: LeaderRecord) -> None:
        """Replace the row; the caller holds its lock."""


class OutboxRepository(Protocol):
    async def add(self, events: Iterable[Event]) -> None:
        """Write the events of a change with the change itself."""

    async def oldest(self, limit: int) -> Sequence[PendingEvent]:
        """Return the oldest events, in the order of their numbers."""

    async def remove(self, numbers: Iterable[int]) -> None:
        """Delete these rows without waiting for the disk, and in the same commit insert the deliveries of
        their events to webhooks: enabled ones of the tenant, older than the event, that want its type.

        An event that a crash of Postgres brings back is published again with the same message id, which the
        log recognizes.
        """

    async def backlog(self) -> tuple[int, float | None]:
        """Return the number of waiting events, and the creation time of the oldest, Unix seconds."""


class PoolRepository(Protocol):
    async def reported(self, report: PoolReport, now: float) -> PoolOrders:
        """Write the pool's report. Returns the pool's orders."""

    async def processes(self, pool: str) -> tuple[str | None, tuple[str, ...]]:
        """Return the process that reports for the pool, and those that it replaced. Locks an existing row."""

    async def replaced(self, pool: str, process: str, former: tuple[str, ...]) -> None:
        """Write which process reports for the pool now, and the former ones."""

    async def get(self, pool: str, *, lock: bool = False) -> PoolOrders | None: ...

    async def write(self, orders: PoolOrders, changed: Collection[str]) -> None:
        """Write the orders named in `changed` and the version. The caller holds the row's lock."""


class RentalRepository(Protocol):
    async def lock(self) -> None: ...

    async def of_pool(self, pool: str, named: Collection[str]) -> dict[str, RentalRow]:
        """Return the pool's open rentals, and those of the workers `named`."""

    async def beside_workers(self) -> list[tuple[RentalRow | None, WorkerRecord]]:
        """Return each worker that has an open rental, or no rental and is not gone, with its rental."""

    async def put(self, rows: Iterable[RentalRow]) -> None:
        """Write the rows, but never change `accrued_s` of an existing row."""

    async def accrue(self, hour: int, minute: int) -> None:
        """Give the sessions that hold a slot now their shares of the time paid since the last call.

        The shares are added to the usage of `hour` and its day as well. They are also added, with the time of
        workers on which no session holds a slot, to the cost of the pools in the minute that began at the
        Unix time `minute`.
        """

    async def usage(self, request: ListUsage) -> UsagePage:
        """Return usage, or its sums, in the order of `UsageDimension`.

        Raises InvalidInputError for a wrong `after`.
        """

    async def forget_usage(self, before_day: int) -> None:
        """Delete the usage of earlier days."""

    async def by_kind(self) -> list[dict[str, Any]]:
        """Return sums over all rentals, by kind."""

    async def by_pool(self) -> list[PoolCost]: ...

    async def used(self) -> Cost:
        """Return the sum of all sessions' shares, including those of deleted sessions."""

    async def of_sessions(self, tenant: str | None, session: str | None, limit: int) -> list[SessionCost]:
        """Return the shares of a tenant's sessions, newest first. The share of a session without one is 0."""


class CorrectionRepository(Protocol):
    async def add(self, correction: Correction) -> Correction:
        """Write the correction and return its row. A row that has its id already stays unchanged."""

    async def total(self, session: str | None = None) -> Cost:
        """Return the sum of all corrections, or of those of one session."""

    async def newest(self, tenant: str | None, limit: int) -> list[Correction]:
        """Return the newest corrections; with `tenant`, those of its sessions."""

    async def share(self, session: str) -> Cost | None:
        """Return a session's share of the cost; None if neither a share nor a session with this id exists."""


class ClockRepository(Protocol):
    async def get(self, name: str) -> Aging | None:
        """Return the aging time, and lock its row; None if there is no row."""

    async def put(self, name: str, aging: Aging) -> None: ...

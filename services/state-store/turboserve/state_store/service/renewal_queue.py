"""Renewals that wait for a shared transaction: one for each process, whatever the number of requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import LoadReport, WorkerRecord
from turboserve.state_store.ports.records import WorkerSessions

BATCH_SESSIONS = 512
"""Maximum number of sessions that the workers of one batch hold. One worker alone may hold more."""


@dataclass(frozen=True)
class PendingRenewal:
    """A request to renew."""

    load: LoadReport
    held: frozenset[str]
    """Sessions of which the worker holds state."""
    now: float
    """Time of the request's arrival, Unix seconds."""
    deadline: float
    """Loop time until which the request is answered."""


@dataclass(frozen=True)
class RenewedLease:
    """A renewal that is committed."""

    renewal: PendingRenewal
    record: WorkerRecord
    sessions: WorkerSessions
    listed: list[SessionRecord] | None = None
    """The sessions that the answer lists, with their playheads. None: not known yet."""


@dataclass
class QueuedRenewal:
    """The newest renewal of one process of a worker, and all requests that it answers."""

    renewal: PendingRenewal
    requests: list[asyncio.Future[RenewedLease | PendingRenewal]] = field(default_factory=list)

    @property
    def awaited(self) -> bool:
        """Whether a request still waits for the result."""
        return not all(request.done() for request in self.requests)

    def resolve(self, outcome: RenewedLease | TurboServeError | None) -> None:
        """Give the requests their result. None: the renewal needs a transaction of its own."""
        for request in self.requests:
            if request.done():
                continue
            if isinstance(outcome, TurboServeError):
                request.set_exception(outcome)
            else:
                request.set_result(outcome or self.renewal)


class RenewalQueue:
    """Renewals in the order of the first request that each answers."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, float], QueuedRenewal] = {}
        """By worker and start of its process: a process that was replaced is refused, and its successor is
        not."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, renewal: PendingRenewal) -> asyncio.Future[RenewedLease | PendingRenewal]:
        """Add a renewal. It takes the place of an earlier one of the same process.

        The result is the renewed lease, or the renewal if it needs a transaction of its own.
        """
        key = renewal.load.worker, renewal.load.started_at
        queued = self._waiting.setdefault(key, QueuedRenewal(renewal))
        queued.renewal = renewal
        request: asyncio.Future[RenewedLease | PendingRenewal] = asyncio.get_running_loop().create_future()
        queued.requests = [*(one for one in queued.requests if not one.done()), request]
        return request

    def take(self, limit: int) -> dict[str, QueuedRenewal]:
        """Remove and return the next batch, by worker. Renewals that no request awaits are dropped."""
        batch: dict[str, QueuedRenewal] = {}
        sessions = 0
        for key, queued in list(self._waiting.items()):
            worker = queued.renewal.load.worker
            if not queued.awaited:
                del self._waiting[key]
                continue
            sessions += len(queued.renewal.held)
            if len(batch) == limit or (batch and sessions > BATCH_SESSIONS):
                break
            if worker not in batch:
                batch[worker] = self._waiting.pop(key)
        return batch

"""Renewals of workers' leases: those that arrive close together share one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import dataclass

from turboserve import logs
from turboserve.contracts.errors import TurboServeError, UnavailableError
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import LoadReport, Renewal, WorkerPhase, WorkerRecord
from turboserve.state_store.core import workers as rules
from turboserve.state_store.hot.session_state import Playheads
from turboserve.state_store.ports.database import Database, UnitOfWork, unavailable
from turboserve.state_store.ports.records import WorkerSessions
from turboserve.state_store.service.transactions import PostCommit
from turboserve.tasks import BackgroundTasks

INTERVAL_S = 0.02
"""Time for which renewals gather after a transaction has begun, seconds. The lease lasts 100 times longer."""
AT_ONCE = 2
"""Transactions of several renewals at once: if one hangs until its deadline, others continue."""
LIMIT = 64
"""Maximum number of renewals in one transaction."""

log = logs.get("renewals")


@dataclass(frozen=True)
class PendingRenewal:
    """A request to renew."""

    load: LoadReport
    held: frozenset[str]
    """Sessions of which the worker holds state."""
    now: float
    """Time of the request's arrival, Unix seconds."""


@dataclass(frozen=True)
class RenewedLease:
    """A renewal that is committed."""

    record: WorkerRecord
    joined: bool
    """Whether the renewal has created the worker's row."""
    sessions: WorkerSessions
    shown: Sequence[SessionRecord] | None = None
    """The sessions that the answer lists. None: a fence is not in the log yet, or no playhead was read."""


class Renewals:
    """Renews leases.

    A renewal begins its transaction at once if no other has begun one within `INTERVAL_S`. Otherwise it waits
    for the rest of this time, and all that wait share one transaction. Each is answered as if it were alone:

    - Its rules apply to its own row, and a refusal concerns only its worker.
    - The shared transaction waits for no lock of a row. A renewal whose row is locked, or does not exist yet,
      has a transaction of its own afterwards.
    - If the shared transaction fails for another reason than an outage, each has one of its own.
    """

    def __init__(self, database: Database, post_commit: PostCommit, playheads: Playheads) -> None:
        self._database, self._post_commit, self._playheads = database, post_commit, playheads
        self._context = copy_context()
        """Context of the timer, so that shared work belongs to no request."""
        self._waiting: list[tuple[PendingRenewal, asyncio.Future[RenewedLease | None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._next_at = 0.0
        """Loop time before which no further transaction begins."""
        self._running = 0
        self._tasks = BackgroundTasks()

    async def renew(self, load: LoadReport, now: float) -> Renewal:
        """Renew the worker's lease and return its sessions. `now`: Unix seconds.

        Raises WorkerGoneError, InvalidInputError and UnavailableError.
        """
        # A worker also holds state that was copied to it for a migration, which may be committed by now.
        sessions = {session.session for session in load.sessions}
        sessions |= {migration.session for migration in load.migrations}
        pending = PendingRenewal(load, frozenset(sessions), now)
        found = await self._gathered(pending)
        if found is None:
            found = await self._alone(pending)
        shown = found.shown
        if shown is None:
            settled = await self._post_commit.settled(found.sessions.assigned)
            shown = await self._playheads.onto(_listed(settled, pending))
        return Renewal(
            worker=load.worker,
            assigned=tuple(shown),
            incoming=tuple(
                one.model_copy(update={"record": _without_notes(self._playheads.apply_to(one.record))})
                for one in found.sessions.incoming
            ),
            keys=tuple(found.sessions.keys),
            drain=found.record.phase is WorkerPhase.DRAINING,
        )

    async def _alone(self, pending: PendingRenewal) -> RenewedLease:
        load = pending.load
        async with self._database.transaction(durable=False) as db:
            before = await db.workers.get(load.worker, lock=True)
            record = rules.renewed(before, load, pending.now)
            if before is not None:
                await _write(db, [(before, record)])
            elif await db.workers.insert(record):
                await db.make_durable()
                await db.outbox.add([rules.joined_event(record, pending.now)])
            sessions = (await db.sessions.of_workers({load.worker: pending.held}))[load.worker]
        if before is None:
            self._post_commit.events()
        return RenewedLease(record, before is None, sessions)

    # Renewals that share a transaction

    async def _gathered(self, pending: PendingRenewal) -> RenewedLease | None:
        """Renew with others. None: the renewal needs a transaction of its own."""
        loop = asyncio.get_running_loop()
        if not self._waiting and loop.time() >= self._next_at:
            self._next_at = loop.time() + INTERVAL_S
            return None
        future: asyncio.Future[RenewedLease | None] = loop.create_future()
        self._waiting.append((pending, future))
        self._schedule()
        return await future

    def _schedule(self) -> None:
        if self._waiting and self._timer is None and self._running < AT_ONCE:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._next_at, self._begin, context=self._context)

    def _begin(self) -> None:
        self._timer = None
        batch, self._waiting = self._waiting[:LIMIT], self._waiting[LIMIT:]
        self._next_at = asyncio.get_running_loop().time() + INTERVAL_S
        self._running += 1
        self._tasks.create(self._run(batch))
        self._schedule()

    async def _run(self, batch: list[tuple[PendingRenewal, asyncio.Future[RenewedLease | None]]]) -> None:
        outcomes: dict[str, RenewedLease | TurboServeError] = {}
        try:
            # Of two requests of one worker, the second has a transaction of its own.
            outcomes = await self._together({one.load.worker: one for one, _ in reversed(batch)})
        except UnavailableError:
            outcomes = {one.load.worker: unavailable() for one, _ in batch}
        except Exception:
            log.exception("renewals are repeated one by one", workers=len(batch))
        finally:
            self._running -= 1
            self._schedule()
            for one, future in batch:
                outcome = outcomes.pop(one.load.worker, None)
                if future.done():
                    continue
                if isinstance(outcome, TurboServeError):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    async def _together(self, batch: dict[str, PendingRenewal]) -> dict[str, RenewedLease | TurboServeError]:
        """Renew the leases of these workers, except those whose rows are locked or do not exist."""
        outcomes: dict[str, RenewedLease | TurboServeError] = {}
        async with self._database.transaction(durable=False) as db:
            rows = await db.workers.lock_free(list(batch))
            changes: list[tuple[WorkerRecord, WorkerRecord]] = []
            for worker, before in rows.items():
                try:
                    record = rules.renewed(before, batch[worker].load, batch[worker].now)
                except TurboServeError as error:
                    outcomes[worker] = error
                else:
                    changes.append((before, record))
            await _write(db, changes)
            found = await db.sessions.of_workers({after.id: batch[after.id].held for _, after in changes})
        leases = [RenewedLease(after, joined=False, sessions=found[after.id]) for _, after in changes]
        outcomes |= {lease.record.id: lease for lease in await self._shown(leases, batch)}
        return outcomes

    async def _shown(
        self, leases: list[RenewedLease], batch: dict[str, PendingRenewal]
    ) -> list[RenewedLease]:
        """Read the playheads of all sessions at once, except of workers that wait for a fence."""
        out, listed = [], []
        for lease in leases:
            if all(row.own_revision is not None or row.epoch == 0 for row in lease.sessions.assigned):
                rows = _listed(lease.sessions.assigned, batch[lease.record.id])
                listed.append((lease, rows))
            else:
                out.append(lease)
        every = iter(await self._playheads.onto(row for _, rows in listed for row in rows))
        for lease, rows in listed:
            shown = [next(every) for _ in rows]
            out.append(RenewedLease(lease.record, lease.joined, lease.sessions, shown))
        return out


async def _write(db: UnitOfWork, changes: Sequence[tuple[WorkerRecord, WorkerRecord]]) -> None:
    """Write rows before and after a renewal. Most change nothing but the time."""
    times: dict[str, float] = {}
    for before, after in changes:
        if before.model_copy(update={"renewed_at": after.renewed_at}) == after:
            times[after.id] = after.renewed_at
        else:
            await db.workers.write(after)
    if times:
        await db.workers.write_renewed_at(times)


def _listed(rows: Sequence[SessionRecord], pending: PendingRenewal) -> list[SessionRecord]:
    """Return the rows that the answer lists, after their fences were written."""
    return [
        _without_notes(row)
        for row in rows
        if row.worker == pending.load.worker and (row.own_revision is not None or row.id in pending.held)
    ]


def _without_notes(record: SessionRecord) -> SessionRecord:
    """Return the record without its metadata, which may be large and which a worker does not need."""
    return record.model_copy(update={"metadata": {}}) if record.metadata else record

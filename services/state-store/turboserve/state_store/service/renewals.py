"""Renewals of workers' leases: those that arrive close together share one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace

from turboserve import logs
from turboserve.contracts.errors import TurboServeError, UnavailableError
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import LoadReport, Renewal, WorkerPhase, WorkerRecord
from turboserve.state_store.core import workers as rules
from turboserve.state_store.hot.session_state import Playheads
from turboserve.state_store.ports.database import Database, UnitOfWork, unavailable
from turboserve.state_store.ports.records import WorkerSessions
from turboserve.state_store.service.renewal_queue import (
    PendingRenewal,
    QueuedRenewal,
    RenewalQueue,
    RenewedLease,
)
from turboserve.state_store.service.transactions import PostCommit
from turboserve.tasks import BackgroundTasks

GATHER_S = 0.1
"""Time for which renewals gather after a transaction has begun, seconds. Leases last 2 s or longer."""
CONCURRENT_BATCHES = 2
"""Shared transactions at once: if one hangs until its deadline, others continue."""
BATCH_LIMIT = 64
"""Maximum number of renewals in one transaction."""
CONCURRENT_SINGLES = 6
"""Transactions at once that renew one lease each: half of the pool of connections."""

log = logs.get("renewals")


class Renewals:
    """Renews leases.

    A renewal begins its transaction at once if no other has begun one within `GATHER_S`, and fewer than
    `CONCURRENT_SINGLES` have one of their own. Otherwise it waits for the rest of this time, and all that
    wait share one transaction. Each is answered as if it were alone:

    - Its rules apply to its own row, and a refusal concerns only its worker.
    - The shared transaction waits for no lock of a row. A renewal whose row is locked, or does not exist yet,
      has a transaction of its own afterwards.
    - If the database refuses the shared transaction, each has one of its own. If the connection fails, each
      is told that the database is unavailable.
    - Each has one deadline, whatever it waits for. At the deadline it is told that the database is
      unavailable. After the commit, the answer leaves out sessions whose fences are not written by then.
    """

    def __init__(
        self, database: Database, post_commit: PostCommit, playheads: Playheads, deadline_s: float
    ) -> None:
        """`deadline_s`: time from a request's arrival to its answer, seconds."""
        self._database, self._post_commit, self._playheads = database, post_commit, playheads
        self._deadline_s = deadline_s
        self._context = copy_context()
        """Context of the timer, so that shared work belongs to no request."""
        self._queue = RenewalQueue()
        self._timer: asyncio.TimerHandle | None = None
        self._next_at = 0.0
        """Loop time before which no further transaction begins."""
        self._running = 0
        self._limit = BATCH_LIMIT
        """As the window of TCP: it halves with each transaction that fails, and grows with each other one."""
        self._singles = asyncio.Semaphore(CONCURRENT_SINGLES)
        self._tasks = BackgroundTasks()

    async def renew(self, load: LoadReport, now: float) -> Renewal:
        """Renew the worker's lease and return its sessions. `now`: Unix seconds.

        Raises WorkerGoneError, InvalidInputError and UnavailableError.
        """
        # A worker also holds state that was copied to it for a migration, which may be committed by now.
        held = {session.session for session in load.sessions}
        held |= {migration.session for migration in load.migrations}
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        lease = await self._renewed(PendingRenewal(load, frozenset(held), now, deadline))
        listed = lease.listed
        if listed is None:
            left_s = deadline - asyncio.get_running_loop().time()
            settled = await self._post_commit.settled(lease.sessions.assigned, left_s)
            listed = await self._playheads.onto(_listed(settled, lease.renewal))
        return Renewal(
            worker=load.worker,
            assigned=tuple(listed),
            incoming=tuple(
                one.model_copy(update={"record": _without_notes(self._playheads.apply_to(one.record))})
                for one in lease.sessions.incoming
            ),
            keys=tuple(lease.sessions.keys),
            drain=lease.record.phase is WorkerPhase.DRAINING,
        )

    async def _renewed(self, renewal: PendingRenewal) -> RenewedLease:
        loop = asyncio.get_running_loop()
        if not self._queue and loop.time() >= self._next_at and not self._singles.locked():
            self._next_at = loop.time() + GATHER_S
            return await self._renew_by_itself(renewal, renewal.deadline)
        request = self._queue.add(renewal)
        self._schedule()
        try:
            async with asyncio.timeout_at(renewal.deadline):
                result = await request
        except TimeoutError:
            raise unavailable() from None
        if isinstance(result, RenewedLease):
            return result
        # A shared transaction has left this renewal out.
        return await self._renew_by_itself(result, renewal.deadline)

    # Renewals with a transaction of their own

    async def _renew_by_itself(self, renewal: PendingRenewal, deadline: float) -> RenewedLease:
        """Renew by `deadline`, on the clock of the loop. Raises as `renew`."""
        loop = asyncio.get_running_loop()

        async def single() -> RenewedLease:
            async with self._singles:
                if loop.time() >= deadline:
                    raise unavailable()
                return await self._renew_one(renewal)

        # A canceled transaction would wait for its rollback.
        task = self._tasks.create(single())
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await asyncio.wait({task}, timeout=deadline - loop.time())
        if not task.done():
            raise unavailable()
        return task.result()

    async def _renew_one(self, renewal: PendingRenewal) -> RenewedLease:
        load = renewal.load
        async with self._database.transaction(durable=False) as db:
            before = await db.workers.get(load.worker, lock=True)
            record = rules.renewed(before, load, renewal.now)
            joined = before is None and await db.workers.insert(record)
            if joined:
                await db.make_durable()
                await db.outbox.add([rules.joined_event(record, renewal.now)])
            else:
                if before is None:
                    # Another transaction has inserted the row meanwhile.
                    before = await db.workers.get(load.worker, lock=True)
                    record = rules.renewed(before, load, renewal.now)
                if before is None:
                    raise unavailable()
                await _write(db, [(before, record)])
        if joined:
            self._post_commit.events()
        sessions = await self._sessions({load.worker: renewal.held})
        return RenewedLease(renewal, record, sessions[load.worker])

    # Renewals that share a transaction

    def _schedule(self) -> None:
        if self._queue and self._timer is None and self._running < CONCURRENT_BATCHES:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._next_at, self._begin, context=self._context)

    def _begin(self) -> None:
        self._timer = None
        batch = self._queue.take(self._limit)
        if not batch:
            return
        self._next_at = asyncio.get_running_loop().time() + GATHER_S
        self._running += 1
        self._tasks.create(self._renew_batch(batch))
        self._schedule()

    async def _renew_batch(self, batch: Mapping[str, QueuedRenewal]) -> None:
        outcomes: Mapping[str, RenewedLease | TurboServeError] = {}
        try:
            outcomes = await self._share_transaction({name: one.renewal for name, one in batch.items()})
            self._limit = min(BATCH_LIMIT, self._limit + 1)
        except UnavailableError as error:
            # The transaction may have been too large for its deadline.
            self._limit = max(1, self._limit // 2)
            if not error.answered:
                outcomes = {name: unavailable() for name in batch}
        except Exception:
            log.exception("renewals are repeated one by one", workers=len(batch))
        finally:
            self._running -= 1
            self._schedule()
            for name, one in batch.items():
                one.resolve(outcomes.get(name))

    async def _share_transaction(
        self, batch: Mapping[str, PendingRenewal]
    ) -> Mapping[str, RenewedLease | TurboServeError]:
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
        try:
            sessions = await self._sessions({after.id: batch[after.id].held for _, after in changes})
            leases = [RenewedLease(batch[after.id], after, sessions[after.id]) for _, after in changes]
            leases = await self._with_playheads(leases)
        except UnavailableError:
            # The renewals are committed, and what was refused stays refused.
            return outcomes | {after.id: unavailable() for _, after in changes}
        return outcomes | {lease.record.id: lease for lease in leases}

    async def _sessions(self, held: Mapping[str, Collection[str]]) -> Mapping[str, WorkerSessions]:
        """Read what the answers list. After the commit: a placement waits for the locks of workers' rows."""
        if not held:
            return {}
        async with self._database.statement() as db:
            found = await db.sessions.of_workers(held)
        return found()

    async def _with_playheads(self, leases: Sequence[RenewedLease]) -> list[RenewedLease]:
        """Read the playheads of all sessions at once, except of workers that wait for a fence."""
        out, listed = [], []
        for lease in leases:
            if all(row.own_revision is not None or row.epoch == 0 for row in lease.sessions.assigned):
                listed.append((lease, _listed(lease.sessions.assigned, lease.renewal)))
            else:
                out.append(lease)
        every = iter(await self._playheads.onto(row for _, rows in listed for row in rows))
        for lease, rows in listed:
            out.append(replace(lease, listed=[next(every) for _ in rows]))
        return out


async def _write(db: UnitOfWork, changes: Sequence[tuple[WorkerRecord, WorkerRecord]]) -> None:
    """Write rows before and after a renewal. Most change nothing but the time; others have a new latency."""
    times: dict[str, float] = {}
    others: list[WorkerRecord] = []
    for before, after in changes:
        if before.model_copy(update={"renewed_at": after.renewed_at}) == after:
            times[after.id] = after.renewed_at
        else:
            others.append(after)
    if others:
        # One round trip: placements on all these workers wait for the end of the transaction.
        await db.workers.write_all(others)
    if times:
        await db.workers.write_renewed_at(times)


def _listed(rows: Sequence[SessionRecord], renewal: PendingRenewal) -> list[SessionRecord]:
    """Return the rows that the answer lists, after their fences were written."""
    return [
        _without_notes(row)
        for row in rows
        if row.worker == renewal.load.worker and (row.own_revision is not None or row.id in renewal.held)
    ]


def _without_notes(record: SessionRecord) -> SessionRecord:
    """Return the record without its metadata, which may be large and which a worker does not need."""
    return record.model_copy(update={"metadata": {}}) if record.metadata else record

"""Workers: renewals, drains, and declarations that a worker is gone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from turboserve import logs
from turboserve.clock import Clock
from turboserve.contracts.errors import NotFoundError
from turboserve.contracts.requests import (
    Done,
    DrainWorker,
    ListWorkers,
    Renew,
    SessionRef,
    WorkerGone,
    WorkerPage,
)
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import LoadReport, Renewal, WorkerPhase, WorkerRecord
from turboserve.state_store.core import device_errors, session_migrations
from turboserve.state_store.core import workers as rules
from turboserve.state_store.core.device_errors import PoisonLimits
from turboserve.state_store.core.rentals import Pricing
from turboserve.state_store.core.workers import Leases
from turboserve.state_store.hot.session_state import Playheads
from turboserve.state_store.log_counts import LogCounts
from turboserve.state_store.ports.database import Database, UnitOfWork
from turboserve.state_store.ports.records import LogProgress, SessionRow
from turboserve.state_store.service.renewals import Renewals
from turboserve.state_store.service.transactions import PostCommit, in_term, locked, pool_fenced

log = logs.get("workers")


class Workers:
    """The endpoints of workers, without their transport. All may raise UnavailableError."""

    def __init__(
        self,
        database: Database,
        post_commit: PostCommit,
        playheads: Playheads,
        clock: Clock,
        leases: Leases,
        connection: Callable[[], int | None],
        poison: PoisonLimits,
        pricing: Pricing,
        log_counts: LogCounts,
        deadline_s: float,
    ) -> None:
        """`connection`: as `Bus.connection`. `deadline_s`: of a transaction, seconds."""
        self._database, self._post_commit = database, post_commit
        self._playheads, self._clock = playheads, clock
        self._leases, self._connection = leases, connection
        self._poison, self._pricing, self._log_counts = poison, pricing, log_counts
        self._renewals = Renewals(database, post_commit, playheads, deadline_s)

    async def renew(self, request: Renew) -> Renewal:
        """Renew the worker's lease and return its sessions. Raises WorkerGoneError to a worker declared gone.

        - A suspended session of which the worker holds no state is left out: the worker has nothing to do for
          it, and there may be more such sessions than fit into one message.
        - A row whose fence is not in the log is listed only to a worker that holds the session already. Such
          a worker keeps the state, and appends nothing until the revision is there.
        """
        load = request.load
        if load.phase is WorkerPhase.GONE:
            await self._left(load)
            return Renewal(worker=load.worker, drain=True)
        self._held_leases().renewed(load.worker, self._clock.monotonic())
        return await self._renewals.renew(load, self._clock.wall())

    async def _left(self, load: LoadReport) -> None:
        await self._gone(WorkerGone(worker=load.worker, reason="the worker has shut down"), load)

    async def gone(self, request: WorkerGone) -> Done:
        """Declare the worker gone. Its rows stay as they are until the scheduler places their sessions again.

        Sessions that migrate to it stay at their sources. Raises ConflictError if the worker may be alive.
        """
        return await self._gone(request)

    async def _gone(self, request: WorkerGone, final_report: LoadReport | None = None) -> Done:
        """As `gone`. `final_report`: the worker's own last report. Another process may own its row by now."""
        now = self._clock.wall()
        stayed: list[SessionRecord] = []
        failed: list[tuple[SessionRow, SessionRecord]] = []
        suspects = () if final_report is None else final_report.device_error_sessions
        playheads = {name: await self._playheads.newest(name) for name in sorted(set(suspects))}
        # Before the transaction: a slow broker must not hold its locks.
        in_log = await self._log_counts.of(playheads)
        async with self._database.transaction() as db:
            if request.term is not None:
                await in_term(db, request.term)
            await pool_fenced(db, request)
            record = await db.workers.get(request.worker, lock=True)
            if final_report is not None and rules.of_earlier_incarnation(record, final_report):
                return Done()
            after = None if record is None else rules.left(record, request.reason)
            if record is not None and after is not None and request.renewed_at is not None:
                leases = self._held_leases()
                leases.check_silent(record, request.renewed_at, self._clock.monotonic())
            if after is not None:
                await db.workers.write(after, gone_at=now)
                await db.outbox.add([rules.left_event(after, now)])
                coming = [one.record.id for one in await db.sessions.migrating_to(after.id)]
                # A fixed order: two workers may leave at once, each the target of the other's sessions.
                for name in sorted({*suspects, *coming}):
                    await db.sessions.get_row(name, lock=True)
                failed = await self._count_device_errors(db, after.id, suspects, in_log, now)
                # As at any end of a session: playheads are stored with counted chunks, and no chunk follows.
                ended = [LogProgress(one.id, 0, 0, playheads[one.id]) for _, one in failed]
                await db.progress.count(ended)
                stayed = await self._abandon_migrations_to(db, after, now)
        self._leases.forget(request.worker)
        self._post_commit.events()
        for session in stayed:
            await self._post_commit.changed(session)
        for row, session in failed:
            await self._playheads.forget(session.id)
            named = (row.record.worker, row.record.target)
            await self._post_commit.owner_changed(session, row.fence_revision, *named)
        return Done()

    async def _count_device_errors(
        self, db: UnitOfWork, worker: str, named: Collection[str], in_log: Mapping[str, int], now: float
    ) -> list[tuple[SessionRow, SessionRecord]]:
        """Count a device error for `named` sessions. Returns failed ones: the rows before, records after.

        `in_log`: see `LogCounts`.
        """
        failed = []
        for session in sorted(set(named)):
            row = await db.sessions.get_row(session, lock=True)
            if row is None:
                continue
            made = in_log.get(session, 0)
            counted = device_errors.count(row.record, worker, len(named), self._poison, now, made)
            if counted is None:
                continue
            change, decision = counted
            await db.changes.write(change)
            await db.controls.note(decision)
            log.warning("device error", worker=worker, session=session, **decision.numbers)
            if change.record.phase.ended:
                failed.append((row, change.record))
        return failed

    def _held_leases(self) -> Leases:
        self._leases.connected(self._connection(), self._clock.monotonic())
        return self._leases

    async def _abandon_migrations_to(
        self, db: UnitOfWork, worker: WorkerRecord, now: float
    ) -> list[SessionRecord]:
        """Abandon all migrations to the worker. The caller holds its row's lock, so none begins."""
        stayed = []
        for one in await db.sessions.migrating_to(worker.id):
            row = (await locked(db, SessionRef(session=one.record.id))).record
            change = session_migrations.abandon(row, one.record.migration or 0, f"{worker.id} is gone", now)
            if change is not None:
                await db.changes.write(change)
                stayed.append(change.record)
        return stayed

    async def drain(self, request: DrainWorker) -> Done:
        async with self._database.transaction() as db:
            await pool_fenced(db, request)
            record = await db.workers.get(request.worker, lock=True)
            if record is None:
                raise NotFoundError(f"there is no worker {request.worker}", field="worker")
            after = rules.draining(record)
            if after is not None:
                await db.workers.write(after)
        return Done()

    async def list(self, request: ListWorkers) -> WorkerPage:
        async with self._database.transaction() as db:
            found = await db.workers.page(include_gone=request.include_gone)
            paid = await db.rentals.beside_workers() if self._pricing.prices else []
        prices = {record.id: self._pricing.of(row, record) for row, record in paid}
        priced = [
            one.model_copy(update={"price": price}) if (price := prices.get(one.id)) else one for one in found
        ]
        return WorkerPage(workers=tuple(priced))

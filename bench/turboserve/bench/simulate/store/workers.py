"""Endpoints of workers, of the lead and of the pool: `service/workers.py`, `leaders.py`, `pools.py`."""

from __future__ import annotations

from collections.abc import Callable

from turboserve.bench.simulate.store.rows import SCHEDULER, Rows
from turboserve.contracts import requests
from turboserve.contracts.errors import NotFoundError
from turboserve.contracts.leading import Campaign, CampaignResult, GetLeader, KeepLead, LeaderRecord
from turboserve.contracts.pool import PoolOrders, PoolReport
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import Incoming, Renewal, WorkerPhase, WorkerRecord
from turboserve.state_store.core import leading, moves
from turboserve.state_store.core import workers as rules
from turboserve.state_store.core.leases import Leases


class Workers:
    """By workers, schedulers and the autoscaler."""

    def __init__(self, rows: Rows, leases: Leases, connection: Callable[[], int | None]) -> None:
        self._rows, self._leases, self._connection = rows, leases, connection

    def _held_leases(self) -> Leases:
        self._leases.connected(self._connection(), self._rows.now)
        return self._leases

    async def renew(self, request: requests.Renew) -> Renewal:
        load = request.load
        held = {one.session for one in load.sessions} | {one.session for one in load.moves}
        if load.phase is WorkerPhase.GONE:
            await self.gone(requests.WorkerGone(worker=load.worker, reason="it left"))
            return Renewal(worker=load.worker, drain=True)
        self._held_leases().heard(load.worker, self._rows.now)
        await self._rows.pause()
        now = self._rows.now

        def work() -> tuple[bool, WorkerRecord, list[SessionRecord], list[Incoming]]:
            before = self._rows.database.workers.get(load.worker)
            record = rules.renewed(before, load, now)
            self._rows.database.workers.put(record.id, record)
            if before is None:
                self._rows.database.make_durable()
                self._rows.tell_of_worker(rules.joined_event(record, now), record.id)
            mine = [
                row
                for row in self._rows.database.rows()
                if row.worker == record.id
                and not row.phase.ended
                and (row.phase is not Phase.SUSPENDED or row.id in held or row.target is not None)
            ]
            return before is None, record, mine, self._rows.moving_to(record.id)

        joined, record, mine, coming = self._rows.database.transaction(work, durable=False)
        if joined:
            self._rows.aftermath.wake()
        told: list[SessionRecord] = []
        for row in mine:
            if row.own_revision is None and row.epoch > 0:
                row = await self._rows.aftermath.fenced(row, None)
            if row.worker == load.worker and (row.own_revision is not None or row.id in held):
                told.append(self._rows.playheads.heard(row))
        return Renewal(
            worker=load.worker,
            assigned=tuple(told),
            incoming=tuple(coming),
            drain=record.phase is WorkerPhase.DRAINING,
        )

    async def gone(self, request: requests.WorkerGone) -> requests.Done:
        await self._rows.pause()
        now = self._rows.now
        stayed: list[SessionRecord] = []

        def work() -> None:
            if request.term is not None:
                self._rows.in_term(request.term)
            record = self._rows.database.workers.get(request.worker)
            after = None if record is None else rules.left(record, request.reason)
            if record is None or after is None:
                return
            if request.renewed_at is not None:
                self._held_leases().check_silent(record, request.renewed_at, self._rows.now)
            self._rows.database.write_gone(after)
            self._rows.tell_of_worker(rules.left_event(after, now), after.id)
            for one in self._rows.moving_to(after.id):
                change = moves.abandon(one.record, one.record.move or 0, f"{after.id} is gone", now)
                if change is not None:
                    self._rows.write(change)
                    stayed.append(change.record)

        self._rows.database.transaction(work)
        self._rows.aftermath.wake()
        for record in stayed:
            self._rows.aftermath.changed(record)
        return requests.Done()

    async def drain(self, request: requests.DrainWorker) -> requests.Done:
        await self._rows.pause()

        def work() -> None:
            record = self._rows.database.workers.get(request.worker)
            if record is None:
                raise NotFoundError(f"there is no worker {request.worker}", field="worker")
            after = rules.draining(record)
            if after is not None:
                self._rows.database.workers.put(after.id, after)

        self._rows.database.transaction(work)
        return requests.Done()

    async def list(self, _: requests.ListWorkers) -> tuple[WorkerRecord, ...]:
        await self._rows.pause()
        return tuple(self._rows.database.transaction(self._rows.database.living))

    # The lead

    async def get_leader(self, request: GetLeader) -> LeaderRecord:
        await self._rows.pause()
        return self._rows.database.transaction(lambda: self._rows.leader(request.name))

    async def campaign(self, request: Campaign) -> CampaignResult:
        await self._rows.pause()

        def work() -> CampaignResult:
            before = self._rows.leader(request.name)
            after = leading.campaign(before, request)
            if after is None:
                return CampaignResult(record=before, granted=False)
            self._rows.database.leaders.put(SCHEDULER, after)
            return CampaignResult(record=after, granted=True)

        return self._rows.database.transaction(work)

    async def keep_lead(self, request: KeepLead) -> LeaderRecord:
        await self._rows.pause()

        def work() -> LeaderRecord:
            after = leading.keep(self._rows.leader(request.name), request)
            self._rows.database.leaders.put(SCHEDULER, after)
            return after

        return self._rows.database.transaction(work)

    # The pool

    async def report_pool(self, report: PoolReport) -> PoolOrders:
        await self._rows.pause()
        database, seen = self._rows.database, (report.maximum, self._rows.now)
        database.transaction(lambda: database.pools.put(report.pool, seen), durable=False)
        return PoolOrders(pool=report.pool)

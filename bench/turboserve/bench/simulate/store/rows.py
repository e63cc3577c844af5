"""Rows, and what every endpoint does with them: read, decide by the store's own rules, write, tell."""

from __future__ import annotations

from collections.abc import Callable

from turboserve.bench.simulate.kernel import Kernel, sleep
from turboserve.bench.simulate.store.aftermath import Aftermath
from turboserve.bench.simulate.store.database import Database, Row
from turboserve.bench.simulate.store.hot import HotStore, Playheads
from turboserve.contracts.errors import SessionNotFoundError
from turboserve.contracts.events import Event
from turboserve.contracts.leading import LeaderRecord
from turboserve.contracts.requests import PlaceSession
from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.contracts.workers import Incoming, WorkerPhase, WorkerRecord
from turboserve.state_store.core import leading
from turboserve.state_store.core.change import Change
from turboserve.state_store.core.workers import Room, Slots, gone
from turboserve.subjects import EVENT, WORKER_EVENT

RETRY_S = 1.0
STATEMENT_S = 0.002
"""Mean time that a transaction takes before it commits."""
SCHEDULER = "scheduler"


class Rows:
    """What one life of the store works with."""

    def __init__(
        self, kernel: Kernel, database: Database, hot: HotStore, aftermath: Aftermath, worker_timeout_s: float
    ) -> None:
        self.kernel, self.database, self.hot, self.aftermath = kernel, database, hot, aftermath
        self.playheads: Playheads = aftermath.playheads
        self._worker_timeout_s = worker_timeout_s

    @property
    def now(self) -> float:
        return self.kernel.now

    async def pause(self) -> None:
        """A transaction takes its time."""
        await sleep(self.kernel.random.expovariate(1.0 / STATEMENT_S))

    def in_term(self, term: int) -> None:
        """Raises StaleTermError if this is not the scheduler's term."""
        leading.check(self.leader(SCHEDULER), term)

    def leader(self, name: str) -> LeaderRecord:
        return self.database.leaders.get(name) or LeaderRecord(name=name)

    async def change(
        self, session: str, rule: Callable[[SessionRecord], Change | None], term: int | None = None
    ) -> SessionRecord:
        """A change without a change of owner; `term` for what only a leader may do."""
        await self.pause()

        def work() -> tuple[SessionRecord, Change | None]:
            if term is not None:
                self.in_term(term)
            record = self.row(session).record
            change = rule(record)
            if change is not None:
                self.write(change)
            return record, change

        record, change = self.database.transaction(work)
        if change is None:
            return self.playheads.onto(record, self.now)
        return self.aftermath.changed(change.record, record.target)

    async def end(self, session: str, rule: Callable[[SessionRecord], Change | None]) -> SessionRecord:
        await self.pause()

        def work() -> tuple[Row, Change | None]:
            row = self.row(session)
            change = rule(row.record)
            if change is not None:
                self.write(change)
            return row, change

        row, change = self.database.transaction(work)
        if change is None:
            return row.record
        self.hot.forget(session)
        self.playheads.forget(session)
        before = row.record
        return await self.aftermath.owned_anew(
            change.record, row.fence_revision, before.worker, before.target
        )

    def row(self, session: str) -> Row:
        row = self.database.sessions.get(session)
        if row is None:
            raise SessionNotFoundError(f"there is no session {session}", field="session")
        return row

    def slots(self, name: str, worker: WorkerRecord | None, besides: str) -> Slots:
        if worker is None:
            raise gone(name)
        return Slots(worker.model, worker.phase, worker.capacity, self.database.slots_used(name, besides))

    def room(self, model: str) -> Room:
        after = self.now - self._worker_timeout_s
        there = list(self.database.workers.values())
        takes = [
            worker
            for worker in there
            if worker.phase in (WorkerPhase.STARTING, WorkerPhase.READY) and worker.renewed_at > after
        ]
        # One that still loads names no place of its own yet.
        serving = sum(worker.phase is WorkerPhase.READY for worker in takes)
        largest = max((worker.capacity for worker in there), default=1)
        maximum = sum(most for most, heard_at in self.database.pools.values() if heard_at > after)
        capacity = sum(worker.capacity for worker in takes) + max(maximum - serving, 0) * max(largest, 1)
        demand = sum(
            record.phase.holds_slot
            or record.phase is Phase.REQUESTED
            or (record.phase is Phase.SUSPENDED and record.activity is Activity.WATCHING)
            for record in self.database.rows()
        )
        return Room(model, len(self.database.workers) > 0, capacity, demand)

    def placed(self, record: SessionRecord, request: PlaceSession) -> bool:
        decision = self.database.decisions.get((record.id, request.expected_version + 1))
        return decision is not None and decision.epoch == record.epoch and decision.worker == request.worker

    def moved(self, record: SessionRecord, move: int) -> bool:
        return any(
            decision.kind == "moved" and decision.epoch == record.epoch
            for (session, _), decision in self.database.decisions.items()
            if session == record.id and decision.numbers.get("move") == move
        )

    def moving_to(self, worker: str) -> list[Incoming]:
        return [
            self.aftermath.incoming(record)
            for record in self.database.rows()
            if record.target == worker and not record.phase.ended
        ]

    def write(self, change: Change) -> None:
        self.database.write_row(change.record)
        if change.decision is not None:
            self.database.decided(change.decision, change.record.version)
        self.tell(change)

    def tell(self, change: Change) -> None:
        for event in change.events:
            self.database.tell(event, EVENT.of(change.record.id))

    def tell_of_worker(self, event: Event, worker: str) -> None:
        self.database.tell(event, WORKER_EVENT.of(worker))

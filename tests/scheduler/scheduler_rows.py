"""The state store's rows in the scheduler's world, and the effects of each commit."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tests.helpers.virtual_world import VirtualWorld
from tests.scheduler.scheduler_faults import Faults
from tests.scheduler.scheduler_workers import Worker
from tests.scheduler.served_store import ServedStore
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import MigrationStage, WorkerPhase, WorkerRecord
from turboserve.scheduler.messages import (
    Answered,
    Command,
    CommitMigration,
    Event,
    Refused,
    SessionChanged,
    WorkerChanged,
)

OPEN: list[RowsWorld] = []
"""Worlds whose store still runs; each test closes its own."""


class RowsWorld(VirtualWorld, ABC):
    """Checks the rows after every change."""

    def __init__(self, seed: int, faults: Faults) -> None:
        super().__init__(seed)
        self.faults = faults
        self.rows: dict[str, SessionRecord] = {}
        self.workers: dict[str, Worker] = {}
        self.no_capacity = 0
        self.placements = 0
        self.copies: dict[tuple[str, int], tuple[MigrationStage, int]] = {}
        """Session and migration → stage at its target, and the next chunk of its copy."""
        self.migrated: list[tuple[float, str]] = []
        """(time, session) of each committed migration."""
        self.migrating_since: dict[str, float] = {}
        self.store = ServedStore(seed, lambda: self.now, self.on_session, self.on_worker)
        OPEN.append(self)

    @abstractmethod
    def publish(self, event: Event) -> None:
        """Send an event to the scheduler through the event log."""

    def serve(self, command: Command) -> Event:
        """Do what the store does with a command when it arrives."""
        if isinstance(command, CommitMigration) and self.chance(self.faults.stale_copy):
            self.store.count_chunk(command.session, self.rows[command.session].next_chunk + 1)
        event = self.store.run(command)
        assert event is not None
        if isinstance(event, Answered) and event.refused is Refused.NO_CAPACITY:
            self.no_capacity += 1
        return event

    def on_session(self, before: SessionRecord | None, after: SessionRecord) -> None:
        """Check a committed change of a session's row."""
        assert before is None or after.epoch >= before.epoch
        assert (after.phase is Phase.MIGRATING) <= (after.target is not None)
        self.rows[after.id] = after
        if before is not None and after.epoch > before.epoch and after.worker is not None:
            if after.worker == before.target:
                self.migrated.append((self.now, after.id))
            else:
                self.placements += 1
        if after.migration is None:
            self.migrating_since.pop(after.id, None)
        elif before is None or before.migration != after.migration:
            self.migrating_since.setdefault(after.id, self.now)
            self.copy(after)
        for worker in self.workers.values():
            assert self.used(worker.id) <= worker.capacity
        self.publish(SessionChanged(after))

    def copy(self, row: SessionRecord) -> None:
        """Begin to copy the session's state to the target."""
        seconds = self.random.uniform(0.1, 60.0 if self.chance(self.faults.slow_copy) else 2.0)
        failed = self.chance(self.faults.failed_copy)
        source, target = self.workers[row.worker or ""], self.workers[row.target or ""]

        def copied() -> None:
            # A state whose worker dies during the copy is not copied.
            now = self.rows[row.id]
            if now.migration == row.migration and source.alive and target.alive:
                stage = MigrationStage.FAILED if failed else MigrationStage.VERIFIED
                self.copies[row.id, row.migration or 0] = (stage, now.next_chunk)

        self.at(seconds, copied)

    def on_worker(self, before: WorkerRecord | None, after: WorkerRecord) -> None:
        """Handle a committed change of a worker's row."""
        gone = after.phase is WorkerPhase.GONE
        if before is None or gone:
            self.publish(WorkerChanged(after))
        if gone:
            worker = self.workers[after.id]
            worker.phase, worker.alive = WorkerPhase.GONE, False
            # The pool's autoscaler replaces the worker.
            self.at(self.random.uniform(0.5, 5.0), self.join)

    def used(self, worker: str, besides: str = "") -> int:
        """Count the worker's slots that are held or reserved."""
        return sum(
            worker in (row.worker, row.target) and row.phase.holds_slot and row.id != besides
            for row in self.rows.values()
        )

    def join(self) -> None:
        worker = Worker(f"wrk_{next(self.names)}", self.random.choice((2, 3, 4)), renewed_at=self.now)
        self.workers[worker.id] = worker
        self.store.renew(worker.load())

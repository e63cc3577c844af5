"""Invariants of what schedulers and the autoscaler decide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.messages import Command as PoolCommand
from turboserve.autoscaler.messages import Drain, Launch, Release, SizesWanted
from turboserve.contracts.pool import LoadFeedback
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import WorkerPhase
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.messages import BeginMigration, CommitMigration, Place, SendFeedback
from turboserve.scheduler.messages import Command as SchedulerCommand
from turboserve.scheduler.placement import MigrationKind
from turboserve.scheduler.placement.minmax import WITHIN_QUOTA
from turboserve.simulation.class_checks import ClassChecks
from turboserve.simulation.names import brief
from turboserve.simulation.pool_offers import takes_places
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.runtime.rows.server import MemoryPostgres
from turboserve.simulation.settings import Scale
from turboserve.simulation.virtual_worker import VirtualWorker

RESTING = (MigrationKind.BALANCE, MigrationKind.SPREAD, MigrationKind.RESCUE)
"""Kinds of migrations before which a session rests."""


class DecisionReports(Protocol):
    """Where the checks of decisions report to."""

    def fail(self, name: str, message: str) -> None:
        """Report a violation of the invariant `name`."""

    def note(self, *what: object) -> None:
        """Write one line of the trace."""


class DecidingDeployment(Protocol):
    """The deployment as the checks of decisions use it."""

    loop: VirtualLoop
    scale: Scale
    postgres: MemoryPostgres

    def worker(self, name: str | None) -> VirtualWorker | None: ...
    def records(self) -> Iterator[SessionRecord]: ...
    def leaders(self) -> list[str]: ...


class DecisionChecks:
    """Checks each command of a core."""

    def __init__(
        self, reports: DecisionReports, deployment: DecidingDeployment, classes: ClassChecks
    ) -> None:
        self._reports, self._deployment, self._classes = reports, deployment, classes
        self.drains = self.resizes = 0
        self.by_quota = 0
        """Number of placements that prefer a worker with fewer sessions of the class than its quota."""
        self.absorbed = self.rescues = 0
        """Number of placements beyond K, and of migrations that save late chunks."""
        self._pool_term = 0
        """Newest term of the autoscalers that share the pool."""
        self._committing: dict[str, Scheduler] = {}
        """Session → the scheduler that last sent the commit of its migration."""
        self._migrated: dict[str, tuple[int, float, Scheduler | None]] = {}
        """Session → epoch and time of its last migration, and the scheduler that committed it."""

    def migrated(self, record: SessionRecord) -> None:
        """Note that a session's migration is committed."""
        committed_by = self._committing.get(record.id)
        self._migrated[record.id] = record.epoch, self._deployment.loop.time(), committed_by

    def scheduler_report(self, name: str, core: Scheduler, commands: list[SchedulerCommand]) -> None:
        leaders = self._deployment.leaders()
        if len(leaders) > 1:
            self._reports.fail("one_leader", f"{leaders} lead at the same time")
        for command in commands:
            if not isinstance(command, SendFeedback):
                self._reports.note(name, brief(command))
            if isinstance(command, Place | BeginMigration):
                self._assigned(core, command)
            if isinstance(command, Place):
                self.by_quota += WITHIN_QUOTA in command.decision.reason
            if isinstance(command, BeginMigration):
                self._begins(core, command)
            elif isinstance(command, CommitMigration):
                self._committing[command.session] = core

    def _begins(self, core: Scheduler, command: BeginMigration) -> None:
        """Check that a session rests after a migration. Drains and operators need not wait."""
        kind = command.decision.reason.partition(":")[0]
        self.rescues += kind == MigrationKind.RESCUE
        if kind not in RESTING:
            return
        epoch, at, committed_by = self._migrated.get(command.session, (0, 0.0, None))
        # Another scheduler may not know of the migration. Another owner begins without a rest.
        if committed_by is core and epoch == command.decision.epoch:
            rested_s = self._deployment.loop.time() - at
            if rested_s < core.policy.migration_cooldown_s:
                self._reports.fail(
                    "sessions_rest", f"{command.session} migrates again after {rested_s:.3f} s: {kind}"
                )

    def _assigned(self, core: Scheduler, command: Place | BeginMigration) -> None:
        """Check that the worker has room: K, or K_floor for a placement while its pool absorbs."""
        if not isinstance(command, Place) and not core.view.sessions[command.session].record.phase.holds_slot:
            # A suspended session goes to host memory. Its target may hold more than K sessions by then.
            return
        worker = core.view.workers[command.worker]
        if worker.classes is not None:
            self._classes.assigned(core, command)
            return
        capacity = worker.capacity
        if isinstance(command, Place) and core.view.absorbs(worker.model, core.listening.now):
            self.absorbed += worker.load > capacity
            capacity = max(capacity, worker.floor_capacity)
        if worker.load > capacity:
            self._reports.fail(
                "capacity", f"the scheduler assigns {worker.load} of {capacity} to {worker.id}"
            )

    def pool_report(self, name: str, term: int | None, pool: Pool, commands: list[PoolCommand]) -> None:
        """Check what the autoscaler `name` does in `term`. `term` None: it is the only one."""
        if term is not None and term < self._pool_term:
            self._reports.fail("one_leader", f"{name} decides in term {term}, after term {self._pool_term}")
        self._pool_term = term or 0
        for command in commands:
            if not isinstance(command, Launch | Drain | Release):
                continue
            self._reports.note(name, type(command).__name__, command.member, command.worker)
            if isinstance(command, Release) and command.worker is not None:
                self._released(command.worker, command.reason)
            if isinstance(command, Drain):
                self.drains += 1
                self._shrinks(pool, command.worker)

    def resized(
        self,
        pool: Pool,
        size: int,
        reason: str,
        heard_at: float | None,
        stale_s: float,
        feedback: LoadFeedback | None,
    ) -> None:
        """Check a decision of the controller that the pool shall have `size` workers.

        `heard_at`: time of `feedback`, the last that the controller accepted.
        """
        now = self._deployment.loop.time()
        self._reports.note("autoscaler resizes", pool.target, size, reason)
        self.resizes += 1
        if size < pool.target and (heard_at is None or now - heard_at > stale_s):
            self._reports.fail(
                "stale_metrics_never_shrink", f"to {size}, last report at {heard_at}: {reason}"
            )
        shrinks = self._deployment.scale.quality_debt_limit > 0 and size < pool.target
        if shrinks and feedback is not None and max(owes := _owes(feedback)) > 0:
            self._reports.fail(
                "debt_never_shrinks",
                f"to {size}, debt {owes[0]:.3f}, deficit {owes[1]:.1f}, {owes[2]} borrow: {reason}",
            )

    def composed(self, pool: Pool, event: SizesWanted, feedback: dict[str, LoadFeedback]) -> None:
        """Check new sizes of the pool's offers: every live session keeps its place.

        `feedback`: the newest of each class that the controller knows.
        """
        file, classes = self._deployment.scale.pool_file, self._deployment.scale.classes
        assert file is not None
        assert classes is not None
        now = self._deployment.loop.time()
        fault = takes_places(pool, event, file, classes.sessions, feedback, now)
        if fault is not None:
            self._reports.fail("keeps_places", fault)

    def _released(self, name: str, reason: str) -> None:
        worker = self._deployment.worker(name)
        entry = self._deployment.postgres.tables.workers.rows.get(name)
        if worker is None or entry is None or entry.record.phase is WorkerPhase.GONE:
            return
        held = [row.id for row in self._deployment.records() if row.worker == name and not row.phase.ended]
        if held:
            self._reports.fail("scale_in_harmless", f"{name} is released ({reason}) and holds {held}")

    def _shrinks(self, pool: Pool, name: str) -> None:
        """Check a drain: the pool may drain only workers beyond its target, and those that it replaces."""
        wanted = sum(slot.wanted for slot in pool.members.values())
        draining = next((slot for slot in pool.members.values() if slot.worker == name), None)
        stays = draining is not None and draining.wanted and draining.replaced is None
        if wanted < pool.target or stays:
            self._reports.fail(
                "stale_metrics_never_shrink", f"{name} is drained, and {wanted} of {pool.target} workers stay"
            )


def _owes(feedback: LoadFeedback) -> tuple[float, float, int]:
    """Return what keeps an absorbing pool from shrinking: debt, deficit, and workers that borrow."""
    return feedback.quality_debt, feedback.deficit, feedback.borrowing

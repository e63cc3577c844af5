"""Feeds the scheduler's core by hand while sessions migrate: two or more workers, and proposed migrations."""

from __future__ import annotations

from typing import Any, TypeVar

from turboserve.baselines.least_loaded import LeastLoaded
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import (
    LoadReport,
    MigrationReport,
    MigrationStage,
    WorkerPhase,
    WorkerRecord,
)
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.messages import (
    AbandonMigration,
    AllListed,
    Answered,
    BeginMigration,
    Command,
    CommitMigration,
    Event,
    ListAll,
    LoadReported,
    Tick,
)
from turboserve.scheduler.placement import Cluster, Migration, MigrationKind
from turboserve.scheduler.policy import Policy

Kind = TypeVar("Kind")
ADDRESS = ("tcp://127.0.0.1:1",)


def worker(name: str, capacity: int = 4, phase: WorkerPhase = WorkerPhase.READY) -> WorkerRecord:
    return WorkerRecord(
        id=name, model="m", phase=phase, capacity=capacity, started_at=1, renewed_at=1, transfer=ADDRESS
    )


def session(name: str = "s", owner: str | None = "a", **more: object) -> SessionRecord:
    fields: dict[str, object] = {
        "id": name,
        "tenant": "t",
        "model": "m",
        "prompt": "p",
        "seed": 1,
        "phase": Phase.ACTIVE,
        "worker": owner,
        "version": 2,
        "epoch": 1,
        "created_at": 1,
        "updated_at": 1,
    }
    return SessionRecord.model_validate({**fields, **more})


class Wishes:
    """A rebalancer that proposes the test's migration for as long as the session may be migrated."""

    def __init__(self) -> None:
        self.migrations: list[Migration] = []
        self.asked = 0
        self.seen = Cluster()

    def wish(self, name: str, target: str, kind: MigrationKind = MigrationKind.BALANCE) -> None:
        self.migrations.append(Migration(name, "a", target, 0.2, 0.1, "it gains", kind, {"bytes": 7.0}))

    def propose(self, cluster: Cluster, now: float) -> list[Migration]:
        self.asked += 1
        self.seen = cluster
        return [
            migration
            for migration in self.migrations
            if (state := cluster.sessions.get(migration.session)) is not None
            and state.movable
            and state.target is None
            and (migration.kind is MigrationKind.DRAIN or max(state.rests_until, state.retries_at) <= now)
            and migration.target not in state.excluded
            and migration.target in cluster.workers
        ]


class Bench:
    """A core filled with rows, and a store: `store` does what a command requests."""

    def __init__(self, *known: WorkerRecord | SessionRecord, policy: Policy | None = None) -> None:
        self.now = 0.0
        self.wishes = Wishes()
        self.policy = policy or Policy(idle_after_s=1e9)
        self.rows: dict[str, SessionRecord] = {}
        self.workers = tuple(row for row in known if isinstance(row, WorkerRecord))
        for row in known:
            if isinstance(row, SessionRecord):
                self.rows[row.id] = row
        self.restart()

    def restart(self) -> None:
        self.core = Scheduler(LeastLoaded(), self.policy, self.wishes)
        self.out: list[Command] = []
        self.feed(Tick())
        self.feed(AllListed(self.take(ListAll).ticket, self.workers, tuple(self.rows.values())))

    def feed(self, event: Event, after: float = 0.0) -> None:
        self.now += after
        self.out += self.core.handle(event, self.now)

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds * 4)):
            for name in list(self.core.view.workers):
                arrivals = tuple(self.core.view.workers[name].arrivals.values())
                self.load(name, *arrivals)
            self.feed(Tick(), after=0.25)

    def take(self, kind: type[Kind]) -> Kind:
        found = next(command for command in self.out if isinstance(command, kind))
        self.out.remove(found)
        return found

    def none(self, *kinds: type[Command]) -> bool:
        return not any(isinstance(command, kinds) for command in self.out)

    def load(self, name: str, *migrations: MigrationReport) -> None:
        self.feed(
            LoadReported(
                LoadReport(worker=name, model="m", capacity=4, migrations=migrations, transfer=ADDRESS)
            )
        )

    def change(self, name: str, **changes: object) -> SessionRecord:
        row = self.rows[name]
        after = row.model_copy(update={**changes, "version": row.version + 1})
        self.rows[name] = after
        return after

    def do(self, command: BeginMigration | CommitMigration | AbandonMigration) -> SessionRecord:
        """Return the row that the store makes of the command."""
        row = self.rows[command.session]
        if isinstance(command, BeginMigration):
            begun = Phase.MIGRATING if row.phase is Phase.ACTIVE else row.phase
            return self.change(row.id, phase=begun, target=command.worker, migration=row.version + 1)
        assert command.migration == row.migration
        phase = Phase.ACTIVE if row.phase is Phase.MIGRATING else row.phase
        over = {"phase": phase, "target": None, "migration": None}
        if isinstance(command, CommitMigration):
            return self.change(row.id, **over, worker=command.worker, epoch=row.epoch + 1)
        if command.release and phase is Phase.SUSPENDED:
            return self.change(row.id, **over, worker=None, epoch=row.epoch + 1)
        return self.change(row.id, **over)

    def store(self, kind: type[Kind]) -> Kind:
        """Carry out the command of this kind and answer it."""
        command = self.take(kind)
        self.feed(Answered(command.ticket, self.do(command)))  # type: ignore[attr-defined,arg-type]
        return command

    def verified(self, name: str = "s", at: str = "b", **more: object) -> None:
        values = {
            "session": name,
            "migration": self.rows[name].migration,
            "stage": MigrationStage.VERIFIED,
            "next_chunk": 4,
        }
        self.load(at, MigrationReport.model_validate({**values, "digest": "d", **more}))


def migrating(**more: Any) -> Bench:
    """Return a bench whose session `s` is migrating from `a` to `b`."""
    row = session(**{"phase": Phase.MIGRATING, "target": "b", "migration": 2, **more})
    return Bench(worker("a"), worker("b"), row)

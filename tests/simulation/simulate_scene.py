"""One calm simulated world with one session, for tests that choose the faults and their times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import MigrationStage
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.messages import CommitMigration
from turboserve.simulation import scenario
from turboserve.simulation.faults import CALM
from turboserve.simulation.injector import FaultInjector
from turboserve.simulation.null_logging import quiet
from turboserve.simulation.service import ServiceProcess
from turboserve.simulation.settings import Scale
from turboserve.simulation.users import Users
from turboserve.simulation.virtual_worker import VirtualWorker
from turboserve.simulation.world import World

SEED = 5
LOOK_S = 0.001
LIMIT_S = 30.0


class Scene:
    """One session, some workers, two schedulers, and no other activity. `scene` creates it."""

    def __init__(self, workers: int = 2, scale: Scale | None = None) -> None:
        self.said: list[tuple[str, Any]] = []
        """Commands of the schedulers, each with its process."""
        shipped = Scale(workers=workers, most_workers=workers, slots=2, gateways=1)
        self.world = World(SEED, CALM, scale or shipped)
        self._injector = FaultInjector(self.world)
        self.users = Users(self.world)
        self.users.stop()
        self.session = ""
        says = self.world.checker.decisions.scheduler_report

        def hears(name: str, core: Scheduler, commands: list[Any]) -> None:
            self.said += [(name, command) for command in commands]
            says(name, core, commands)

        self.world.checker.decisions.scheduler_report = hears  # type: ignore[method-assign]
        self.world.begin()

    @property
    def row(self) -> SessionRecord:
        return self.world.postgres.tables.sessions.rows[self.session].record

    def worker(self, name: str | None) -> VirtualWorker:
        return self.world.workers[str(name)]

    def leader(self) -> ServiceProcess:
        [name] = self.world.leaders()
        return self.world.service(name)

    def those_that_said(self, kind: type[Any]) -> set[str]:
        return {name for name, command in self.said if isinstance(command, kind)}

    def does(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.world.loop.spawn(self.world.loop.world, work)

    def until(self, there: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        deadline = self.world.loop.time() + limit_s
        while not there():
            assert self.world.loop.time() < deadline, self.world.checker.messages
            self.world.loop.advance(LOOK_S)

    def session_runs(self) -> None:
        """Create a session and wait until it runs and is watched."""
        world = self.world
        self.until(lambda: world.free_slots() == world.scale.workers * world.scale.slots)
        created = self.does(self.users.create(1, attempts=4))
        self.until(created.done)
        self.session = created.result().id
        self.users.watch(self.session, from_start=True)
        self.until(lambda: self.row.next_chunk >= 3 and self.row.phase is Phase.ACTIVE)

    def loses_unseen_chunks(self, away_s: float) -> None:
        """Let the running session make chunks that no viewer gets, then restart the broker without them.

        The broker is away for `away_s` virtual seconds.
        """
        world, written_until = self.world, self.world.loop.time()
        world.broker.cut_off(world.service("gateway-1").process, 3.0)
        world.loop.advance(3.0)
        world.broker.stop()
        world.loop.advance(away_s)
        world.restart_broker_without_tail(written_until)
        world.loop.advance(20.0)

    def migration_begins(self) -> None:
        """Wait until the session runs, then migrate it as an operator."""
        self.session_runs()
        self.said.clear()
        self.does(self.users.ask(lambda g: g.sessions.migrate(None, self.session, None), 1))
        self.until(lambda: self.row.migration is not None)

    def comes_to(self, moment: str, source: str, target: str) -> None:
        epoch = self.row.epoch
        stages = {
            "begun": lambda: True,
            "copying": lambda: self.session in self.worker(source).copies,
            "verified": lambda: any(
                one.stage is MigrationStage.VERIFIED
                for one in self.worker(target).worker.table.incoming.reports()  # type: ignore[union-attr]
            ),
            "commit sent": lambda: bool(self.those_that_said(CommitMigration)),
            "committed": lambda: self.row.epoch == epoch + 1,
        }
        self.until(stages[moment])
        if moment in ("begun", "copying", "verified"):
            assert self.row.phase is Phase.MIGRATING
            assert not self.those_that_said(CommitMigration)
        elif moment == "commit sent":
            assert self.row.epoch == epoch

    def victim(self, who: str, source: str, target: str) -> ServiceProcess:
        match who:
            case "leader":
                return self.leader()
            case "source" | "target":
                service = self.worker(source if who == "source" else target).service
                assert service is not None
                return service
        return self.world.service(f"{who}-1")

    def rests(self) -> SessionRecord:
        """Wait until the migration is over and everything runs.

        Returns the row; no invariant was violated.
        """
        self._injector.stop()
        self.world.mark_calm()
        assert scenario.settle(self.world, self.users) is not None, self.world.checker.messages
        row = self.row
        assert row.phase is Phase.ACTIVE
        scenario.end(self.world, self.users)
        assert not self.world.checker.messages
        return row


@contextmanager
def scene(workers: int = 2, scale: Scale | None = None) -> Iterator[Scene]:
    made = Scene(workers, scale)
    with quiet(made.world):
        try:
            yield made
        finally:
            made.world.close()

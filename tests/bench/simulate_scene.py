"""One calm simulated world with one session in it, for tests that say themselves what goes wrong and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from turboserve import subjects
from turboserve.bench.simulate import play
from turboserve.bench.simulate.faults import CALM
from turboserve.bench.simulate.gateway import Viewer
from turboserve.bench.simulate.kernel import Program
from turboserve.bench.simulate.worker import MODEL, Worker
from turboserve.bench.simulate.world import World
from turboserve.contracts.requests import CreateSession, MoveSession
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import MoveStage

SESSION = "ses_1"
SEED = 5
"""Of a world of two workers at least."""
LOOK_S = 0.001
LIMIT_S = 30.0


class Scene:
    """One session, two workers or more, two schedulers; nothing else happens."""

    def __init__(self) -> None:
        self.world = World(SEED, faults=CALM)
        assert self.world.autoscaler.policy.least >= 2
        self.world.users.stop()
        self.said: list[tuple[int, Any]] = []
        """Commands of the schedulers, each with its term."""
        self.commit_sent = False
        for process in self.world.schedulers:
            process.on_command = self._hears(process.on_command)
        self._listen_for_commits()

    def _hears(self, before: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def heard(term: Any, command: Any) -> None:
            self.said.append((term.term, command))
            before(term, command)

        return heard

    def _listen_for_commits(self) -> None:
        call = self.world.network.call

        def called(source: Program, service: str, name: str, *rest: Any) -> Any:
            self.commit_sent = self.commit_sent or name == subjects.COMMIT_MOVE.subject
            return call(source, service, name, *rest)

        self.world.network.call = called  # type: ignore[method-assign]

    @property
    def row(self) -> SessionRecord:
        row = self.world.database.sessions.get(SESSION)
        assert row is not None
        return row.record

    def worker(self, name: str | None) -> Worker:
        return self.world.workers[str(name)]

    def leader(self) -> Program:
        [leader] = [each.program for each in self.world.schedulers if each.at_work and each.at_work.leads()]
        return leader

    def terms_that(self, kind: type[Any]) -> set[int]:
        return {term for term, command in self.said if isinstance(command, kind)}

    def until(self, there: Callable[[], bool]) -> None:
        deadline = self.world.kernel.now + LIMIT_S
        while not there():
            assert self.world.kernel.now < deadline, self.world.checker.messages
            self.world.kernel.run(LOOK_S)

    def session_runs(self) -> None:
        """It runs and is watched."""
        world = self.world
        world.seeds[SESSION] = 1
        request = CreateSession(id=SESSION, tenant="t", model=MODEL, prompt="a red circle", seed=1)
        self.until(lambda: world.free_slots() >= 2)
        world.gateway.ask(subjects.CREATE_SESSION, request, 4)
        world.users.viewers.append(Viewer("view_1", SESSION))
        self.until(lambda: world.database.sessions.get(SESSION) is not None and self.row.next_chunk >= 3)

    def move_begins(self) -> None:
        """It runs, and an operator moves it."""
        self.session_runs()
        self.world.gateway.ask(subjects.MOVE_SESSION, MoveSession(session=SESSION), 1)
        self.until(lambda: self.row.move is not None)

    def comes_to(self, moment: str, source: str, target: str) -> None:
        arrivals = self.worker(target).table.arrivals
        stages = {
            "begun": lambda: True,
            "copying": lambda: SESSION in self.worker(source).source._open,
            "verified": lambda: any(one.stage is MoveStage.VERIFIED for one in arrivals.reports()),
            "commit sent": lambda: self.commit_sent,
            "committed": lambda: self.row.epoch == 2,
        }
        self.until(stages[moment])
        if moment in ("begun", "copying", "verified"):
            assert self.row.phase is Phase.MIGRATING
            assert not self.commit_sent
        elif moment == "commit sent":
            assert self.row.epoch == 1

    def victim(self, who: str, source: str, target: str) -> Program:
        match who:
            case "leader":
                return self.leader()
            case "source":
                return self.worker(source).program
            case "target":
                return self.worker(target).program
            case "state-store":
                return self.world.store.program
        return self.world.autoscaler.program

    def rests(self) -> SessionRecord:
        """The row when the move is over and everything runs; nothing was violated on the way."""
        self.world.calm()
        assert play._settle(self.world) is not None, self.world.checker.messages
        row = self.row
        assert row.phase is Phase.ACTIVE
        play._end(self.world)
        assert not self.world.checker.messages
        self.world.close()
        return row

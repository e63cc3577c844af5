"""One move in a calm world, and somebody who dies, or stands still, at a given moment of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

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
from turboserve.scheduler.messages import CommitMove

SESSION = "ses_1"
SEED = 5
"""Of a world of two workers at least."""
LOOK_S = 0.001
LIMIT_S = 30.0
FREEZE_S = 12.0
"""Longer than a standby waits."""

MOMENTS = ("begun", "copying", "verified", "commit sent", "committed")
VICTIMS = ("leader", "source", "target", "state-store", "autoscaler")


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

    def move_begins(self) -> None:
        """It runs and is watched; then an operator moves it."""
        world = self.world
        world.seeds[SESSION] = 1
        request = CreateSession(id=SESSION, tenant="t", model=MODEL, prompt="a red circle", seed=1)
        self.until(lambda: world.free_slots() >= 2)
        world.gateway.ask(subjects.CREATE_SESSION, request, 4)
        world.users.viewers.append(Viewer("view_1", SESSION))
        self.until(lambda: world.database.sessions.get(SESSION) is not None and self.row.next_chunk >= 3)
        world.gateway.ask(subjects.MOVE_SESSION, MoveSession(session=SESSION), 1)
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


@dataclass(frozen=True)
class Played:
    """What came of it."""

    scene: Scene
    row: SessionRecord
    """Before the session was ended."""
    source: str
    target: str


def played(moment: str, who: str, harm: Callable[[Program], None]) -> Played:
    with play.quiet():
        scene = Scene()
        scene.move_begins()
        source, target = str(scene.row.worker), str(scene.row.target)
        scene.comes_to(moment, source, target)
        harm(scene.victim(who, source, target))
        return Played(scene, scene.rests(), source, target)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("who", VICTIMS)
def test_a_move_survives_a_death_at_every_stage(moment: str, who: str) -> None:
    end = played(moment, who, lambda victim: victim.kill("kill -9"))
    owner = (end.row.worker, end.row.epoch)
    decided = moment in ("commit sent", "committed")
    if who == "source":
        # Dead before the state was there: another worker goes on from the latents. After that it is moved.
        assert owner == (end.target, 2) if decided else end.row.epoch == 2
    elif who == "target" and decided:
        # It owned the session, so the session is recovered from it.
        assert end.row.epoch == 3
        assert end.row.worker != end.target
    elif who == "target":
        assert owner == (end.source, 1)
    else:
        assert owner == (end.target, 2)


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_standby_finishes_what_a_dead_leader_had_begun(moment: str) -> None:
    end = played(moment, "leader", lambda victim: victim.kill("kill -9"))
    assert (end.row.worker, end.row.epoch) == (end.target, 2)
    by_the_first = moment in ("commit sent", "committed")
    assert end.scene.terms_that(CommitMove) == ({1} if by_the_first else {2})


def test_the_standby_undoes_a_move_that_does_not_end() -> None:
    """Its target stands still and is not dead yet: nobody but the rows knows of the move."""
    with play.quiet():
        scene = Scene()
        scene.move_begins()
        source, target = str(scene.row.worker), str(scene.row.target)
        scene.comes_to("copying", source, target)
        scene.leader().kill("kill -9")
        scene.worker(target).program.freeze(LIMIT_S)
        scene.until(lambda: scene.row.move is None)
        assert (scene.row.worker, scene.row.epoch, scene.row.phase) == (source, 1, Phase.ACTIVE)
        assert scene.terms_that(CommitMove) == set()
        scene.rests()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_leader_that_stood_still_meanwhile_does_no_harm(moment: str) -> None:
    """It wakes up in the middle of what it was about to do, in a term that is over."""
    end = played(moment, "leader", lambda victim: victim.freeze(FREEZE_S))
    assert (end.row.worker, end.row.epoch) == (end.target, 2)

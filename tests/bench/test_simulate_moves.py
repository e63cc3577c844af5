"""One move in a calm world, and somebody who dies, or stands still, at a given moment of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from simulate_scene import LIMIT_S, Scene

from turboserve.bench.simulate import play
from turboserve.bench.simulate.kernel import Program
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.scheduler.messages import CommitMove

FREEZE_S = 12.0
"""Longer than a standby waits."""

MOMENTS = ("begun", "copying", "verified", "commit sent", "committed")
VICTIMS = ("leader", "source", "target", "state-store", "autoscaler")


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
    elif who == "target":
        # What it said last may still have made it the owner; then the session is recovered from it.
        committed = decided or bool(end.scene.terms_that(CommitMove))
        assert end.row.worker != end.target
        assert end.row.epoch == (3 if committed else 1)
        assert moment == "verified" or committed == decided
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

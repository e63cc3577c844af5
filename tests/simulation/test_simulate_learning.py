"""What the autoscaler has learned outlives its process, in the simulation of all services."""

from __future__ import annotations

from turboserve.autoscaler.control.learner import HeadroomLearner
from turboserve.simulation.faults import CALM
from turboserve.simulation.settings import Scale
from turboserve.simulation.world import World

LOST_S = 12.0
"""The autoscaler stores what it learned every ten seconds."""


def learner(world: World) -> HeadroomLearner:
    assert world.autoscaler is not None
    assert world.autoscaler.control is not None
    found = world.autoscaler.control.controller.learner
    assert found is not None
    return found


def test_a_killed_autoscaler_continues_from_what_it_learned() -> None:
    world = World(7, CALM, Scale(workers=1, most_workers=3, gateways=1))
    world.begin()
    world.loop.advance(60.0)
    before = learner(world)
    seen_s = before.seen_s
    assert seen_s > 50.0
    world.service("autoscaler-1").kill("kill -9")
    world.loop.advance(5.0)
    after = learner(world)
    assert after is not before
    assert seen_s - LOST_S <= after.seen_s
    # Without the stored state it would have seen less than the time since it was killed.
    assert after.seen_s > 40.0
    assert max(each.cost_s for each in after.sums) > 40.0
    assert not world.checker.violations
    world.close()

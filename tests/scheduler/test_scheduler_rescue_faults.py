"""Whole schedulers with rescues: under faults with slack, and equal to plain ones without slack."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scheduler.scheduler_faults import MANY
from tests.scheduler.scheduler_rows import OPEN
from tests.scheduler.scheduler_world import World
from tests.scheduler.test_scheduler_cluster_projection import compare
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.messages import BeginMigration, Command, Event
from turboserve.scheduler.placement import MinMaxRebalancer, Weights
from turboserve.scheduler.policy import Policy


@pytest.fixture(autouse=True)
def closed_worlds() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().store.close()


def run(world: World) -> None:
    for _ in range(60):
        for _ in range(world.random.choice((0, 0, 1, 1, 4))):
            world.fiddle()
        world.run(0.5)


def rescuing() -> MinMaxRebalancer:
    return MinMaxRebalancer(Weights(rescue_horizon_s=5.0))


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 12))]
)
def test_whole_schedulers_without_slack_give_the_same_commands(seed: int) -> None:
    class RescuingWorld(World):
        def scheduler(self) -> Scheduler:
            plain = super().scheduler()
            return Scheduler(plain.placement, self.policy, rescuing())

    class PlainWorld(World):
        def scheduler(self) -> Scheduler:
            plain = super().scheduler()
            return Scheduler(plain.placement, self.policy, MinMaxRebalancer())

    worlds = RescuingWorld(seed, MANY), PlainWorld(seed, MANY)
    for world in worlds:
        run(world)
    assert worlds[0].trace == worlds[1].trace
    assert worlds[0].trace


class RescuingWorld(World):
    """Workers report slacks, and sessions are rescued. The index is compared with the view at each event."""

    reports_slack = True
    rescues = 0

    def scheduler(self) -> Scheduler:
        return Scheduler(super().scheduler().placement, self.policy, rescuing())

    def feed(self, event: Event, generation: int) -> None:
        super().feed(event, generation)
        if self.now >= self.paused_until:
            compare(self.core, self.now)

    def check(self, command: Command) -> None:
        super().check(command)
        if isinstance(command, BeginMigration) and command.decision.reason.startswith("rescue"):
            self.rescues += 1


@pytest.mark.parametrize("seeds", [3, pytest.param(24, marks=pytest.mark.soak)])
def test_under_faults_sessions_are_rescued_and_nothing_is_overfilled(seeds: int) -> None:
    rescues = 0
    for seed in range(seeds):
        world = RescuingWorld(seed, MANY, policy=Policy(idle_after_s=1e9, migration_cooldown_s=3.0))
        run(world)
        world.calm()
        world.run(60)
        assert not world.unserved() or world.free() == 0
        assert world.slow_migrations() == {}
        rescues += world.rescues
    assert rescues > 0.8 * seeds

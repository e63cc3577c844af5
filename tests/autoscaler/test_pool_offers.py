"""The pool's core with several offers, under faults, and with one as before."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.autoscaler.pool_world import MANY, NONE, World, settle
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.messages import Event, SizesWanted, SizeWanted
from turboserve.contracts.pool import PoolMemberPhase


class OfferWorld(World):
    """The pool has the offers `a` and `b`, of which `a` has two workers."""

    def _new_pool(self) -> Pool:
        pool = super()._new_pool()
        self.at(0.0, lambda: self.feed(self.sizes(), self.generation))
        return pool

    def sizes(self) -> SizesWanted:
        return SizesWanted({"a": min(2, self.size), "b": max(self.size - 2, 0)}, "test")

    def feed(self, event: Event, generation: int) -> None:
        super().feed(self.sizes() if isinstance(event, SizeWanted) else event, generation)

    def members(self) -> Counter[str]:
        return Counter(process.member.split("-")[1] for process in self.processes.values() if process.alive)


@pytest.mark.parametrize("seed", range(6))
def test_each_offer_has_its_workers_after_faults_and_restarts(seed: int) -> None:
    world = OfferWorld(seed, MANY, size=4)
    for _ in range(60):
        world.run(1.0)
        if world.chance(0.05):
            world.resize(world.random.randrange(6))
    settle(world)
    assert world.members() == Counter({"a": min(2, world.size), "b": max(world.size - 2, 0)})


def test_a_release_and_a_hire_at_the_same_size_change_offers() -> None:
    world = OfferWorld(1, NONE, size=3)
    world.run(30)
    assert world.members() == {"a": 2, "b": 1}
    before = set(world.processes)
    world.feed(SizesWanted({"a": 1, "b": 2}, "a switch"), world.generation)
    assert world.pool.target == 3
    assert "a 2 → 1, b 1 → 2: a switch" in [action.reason for action in world.pool.actions]
    world.run(120)
    alive = {process.worker for process in world.processes.values() if process.alive}
    assert Counter(world.pool.members[world.processes[name].member].offer for name in alive) == {
        "a": 1,
        "b": 2,
    }
    assert len(alive & before) == 2
    assert world.phases() == [PoolMemberPhase.READY] * 3


def test_workers_of_an_offer_that_the_pool_no_longer_has_drain() -> None:
    world = World(1, NONE, size=3)
    world.run(30)
    plain = set(world.processes)
    world.pool = Pool("local", lambda: f"wrk_{next(world.names)}", world.policy)
    world.generation += 1
    world.feed(SizesWanted({"a": 1}, "the pool file"), world.generation)
    world.run(200)
    alive = [process for process in world.processes.values() if process.alive]
    assert [process.member for process in alive] == ["local-a-0"]
    assert {process.worker for process in alive}.isdisjoint(plain)


class TwinWorld(World):
    """A second core gets the same events, sizes of a sole offer among them."""

    twin: Pool | None = None

    def restart(self) -> None:
        super().restart()
        self.twin = None

    def feed(self, event: Event, generation: int) -> None:
        if generation != self.generation:
            return
        if self.twin is None:
            self.twin = Pool("local", lambda: self.launched.pop(0), self.policy)
        self.launched: list[str] = []
        made = self.pool._life._new_worker

        def noted() -> str:
            self.launched.append(made())
            return self.launched[-1]

        self.pool._life._new_worker = noted
        commands = self.pool.handle(event, self.now)
        self.pool._life._new_worker = made
        same = SizesWanted({"": event.size}, event.reason) if isinstance(event, SizeWanted) else event
        assert self.twin.handle(same, self.now) == commands
        for command in commands:
            self.carry_out(command)


@pytest.mark.parametrize("seed", range(3))
def test_one_offer_gives_the_commands_of_a_pool_without_offers(seed: int) -> None:
    world = TwinWorld(seed, MANY, size=3)
    for _ in range(60):
        world.run(1.0)
        if world.chance(0.1):
            world.resize(world.random.randrange(6))
    assert world.launches > 3

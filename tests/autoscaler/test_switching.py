"""A worker that takes the place of one of another offer: the pool's core, step by step and under faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.autoscaler.autoscaler_bench import Bench, row
from tests.autoscaler.offer_fleet import TERMS
from tests.autoscaler.pool_world import MANY, NONE, Faults, World, settle
from tests.autoscaler.test_composition_faults import MemberLoop, member
from turboserve.autoscaler.control.composition_goal import answer_to
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.messages import (
    Drain,
    Event,
    Exited,
    Failed,
    Launch,
    Release,
    Reserve,
    RunningWorker,
    SizesWanted,
    SizeWanted,
    Tick,
)
from turboserve.autoscaler.pool_file import PoolFile
from turboserve.autoscaler.pool_members import PoolMember
from turboserve.autoscaler.pool_start import control_of
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.autoscaler.status import is_ready, pool_status
from turboserve.contracts.pool import LoadFeedback, PoolMemberPhase, PoolOrders
from turboserve.contracts.workers import WorkerPhase

PAIR = (("a", "b"),)


class SwitchBench(Bench):
    """A pool with a ready worker of the offer `a`, which is to be switched to `b`."""

    def __init__(self) -> None:
        super().__init__(0)
        self.feed(SizesWanted({"a": 1, "b": 0}, "test"))
        self.list_members()
        self.worker = self.launch()
        self.feed(SizesWanted({"a": 0, "b": 1}, "a switch", PAIR))

    @property
    def members(self) -> dict[str, PoolMember]:
        return self.pool.members

    def drained(self) -> Release:
        """Let the first worker drain. Returns the command to end it."""
        self.do(Drain)
        for _ in range(2):
            # The first list may have been asked for before the drain.
            self.list_workers(row(self.worker, WorkerPhase.DRAINING))
        return self.take(Release)


def test_the_new_worker_starts_in_the_place_of_the_one_that_has_ended() -> None:
    bench = SwitchBench()
    waiting = bench.members["local-b-0"]
    assert (waiting.phase, waiting.wanted) == (PoolMemberPhase.VACANT, True)
    assert waiting.reason == "takes the place of local-a-0 when its worker has ended"
    assert is_ready(bench.pool, managed=True)
    status = pool_status(bench.pool, "test", True, bench.now, 1e9, lambda offer: (f"model-{offer}",))
    assert {one.member: one.models for one in status.members} == {
        "local-a-0": ("model-a",),
        "local-b-0": ("model-b",),
    }
    bench.do(Drain)
    bench.list_workers(row(bench.worker, WorkerPhase.DRAINING, sessions=1))
    bench.feed(Tick(), after=300.0)
    # Its last session keeps the worker, and with it the place.
    assert not bench.has(Release)
    assert not bench.has(Reserve)
    bench.list_workers(row(bench.worker, WorkerPhase.DRAINING))
    assert not bench.has(Reserve)
    assert bench.do(Release).worker == bench.worker
    assert "local-a-0" not in bench.members
    assert bench.do(Reserve).member == "local-b-0"
    launched = bench.do(Launch)
    assert launched.member == "local-b-0"
    assert launched.worker != bench.worker
    bench.report(launched.worker)
    assert [one.phase for one in bench.members.values()] == [PoolMemberPhase.READY]


@pytest.mark.parametrize("step", ["before the drain", "after the drain", "at its end"])
def test_a_worker_that_dies_gives_its_place_up_at_once(step: str) -> None:
    bench = SwitchBench()
    if step == "after the drain":
        bench.do(Drain)
    if step == "at its end":
        release = bench.drained()
        bench.feed(Exited(bench.worker, "ended"))
        bench.feed(Failed(release.ticket, "no answer"))
        assert not bench.has(Reserve), "whether its process has ended is not known"
        bench.feed(Tick(), after=5.0)
    else:
        bench.feed(Exited(bench.worker, "killed"))
    assert not bench.has(Reserve)
    bench.do(Release)
    assert bench.do(Reserve).member == "local-b-0"


def test_an_autoscaler_that_restarts_knows_the_worker_that_drains_and_begins_no_other() -> None:
    bench = SwitchBench()
    bench.do(Drain)
    again = Bench(0)
    again.pool.leaving = frozenset({bench.worker})
    again.feed(SizesWanted({"a": 0, "b": 0}, "already running"))
    again.list_members(RunningWorker("local-a-0", bench.worker))
    again.report(bench.worker, WorkerPhase.DRAINING)
    assert not again.has(Reserve)
    # The next plan decides anew what the pool has.
    again.do(Drain)
    for _ in range(2):
        again.list_workers(row(bench.worker, WorkerPhase.DRAINING))
    again.do(Release)
    assert again.pool.members == {}
    assert not again.has(Reserve)


def test_a_launch_that_fails_is_tried_again_in_the_place() -> None:
    bench = SwitchBench()
    bench.feed(Exited(bench.worker, "killed"))
    bench.do(Release)
    bench.do(Reserve)
    bench.feed(Failed(bench.take(Launch).ticket, "no such file", missing=True))
    bench.feed(Tick(), after=60.0)
    assert bench.do(Launch).member == "local-b-0"
    assert bench.members["local-b-0"].failures == 1


def test_a_switch_that_is_not_wanted_any_more_starts_nothing() -> None:
    bench = SwitchBench()
    bench.feed(SizesWanted({"a": 0, "b": 0}, "the sessions ended"))
    assert list(bench.members) == ["local-a-0"]
    bench.drained()
    assert not bench.has(Reserve)


def test_a_switch_back_waits_for_the_same_place() -> None:
    bench = SwitchBench()
    bench.feed(SizesWanted({"a": 1, "b": 0}, "a switch back", (("b", "a"),)))
    assert sorted(bench.members) == ["local-a-0", "local-a-1"]
    assert bench.members["local-a-1"].waits_for == "local-a-0"
    bench.drained()
    assert not bench.has(Reserve)


class SwitchWorld(World):
    """A pool whose controller switches workers between two offers."""

    sizes: dict[str, int]

    def _new_pool(self) -> Pool:
        self.sizes = {"a": self.size - 1, "b": 1}
        pool = Pool("local", lambda: f"wrk_{next(self.names)}", self.policy)
        self.at(0.0, lambda: self.feed(SizesWanted(dict(self.sizes), "test"), self.generation))
        return pool

    def feed(self, event: Event, generation: int) -> None:
        super().feed(
            SizesWanted(dict(self.sizes), "test") if isinstance(event, SizeWanted) else event, generation
        )

    def switch(self) -> None:
        before, after = ("a", "b") if self.random.random() < 0.5 else ("b", "a")
        if self.sizes[before]:
            self.sizes[before] -= 1
            self.sizes[after] += 1
            self.feed(SizesWanted(dict(self.sizes), "a switch", ((before, after),)), self.generation)

    def alive(self) -> Counter[str]:
        return Counter(one.member.split("-")[1] for one in self.processes.values() if one.alive)


def run_switches(seed: int, faults: Faults) -> SwitchWorld:
    world = SwitchWorld(seed, faults, size=3)
    for _ in range(120):
        world.run(1.0)
        if faults.restart == 0:
            assert world.alive().total() <= world.size, "a switch has started a further worker"
        if world.chance(0.1):
            world.switch()
    settle(world)
    return world


@pytest.mark.parametrize("seed", range(6))
def test_switches_start_no_further_worker_whatever_fails(seed: int) -> None:
    world = run_switches(seed, replace(MANY, restart=0.0))
    assert world.alive() == +Counter(world.sizes)


@pytest.mark.parametrize("seed", range(3))
def test_after_restarts_in_the_midst_of_switches_the_pool_is_whole(seed: int) -> None:
    world = run_switches(seed, MANY)
    assert world.alive() == +Counter(world.sizes)


def test_without_faults_every_switch_ends() -> None:
    world = run_switches(1, NONE)
    assert world.alive() == +Counter(world.sizes)


def waiting(name: str, place: str) -> PoolMember:
    found = member(name, PoolMemberPhase.VACANT)
    found.waits_for = place
    return found


def test_a_place_that_is_not_given_up_is_left_to_the_next_plan() -> None:
    """The last session of a worker may stay for hours. Meanwhile its kind may have room elsewhere."""

    class RoomyLoop(MemberLoop):
        terms = TERMS | {"big": replace(TERMS["big"], most=3)}

        def resized(self, sizes: Mapping[str, int], switches: Sequence[tuple[str, str]]) -> None:
            self.members = [one for one in self.members if sizes[one.offer] or one.worker is not None]

    draining = member("wide-0", PoolMemberPhase.DRAINING, wanted=False, sessions=1, worker="wrk_0")
    ready = member("wide-1", PoolMemberPhase.READY, worker="wrk_1")
    pool = RoomyLoop({"wide": 1, "both": 1}, draining, ready, waiting("both-0", "p-wide-0"))
    pool.run(30, light=9, large=1)
    assert pool.sizes == {"wide": 1, "tiny": 0, "both": 1}
    assert [one.name for one in pool.members] == ["p-wide-0", "p-wide-1", "p-both-0"]
    pool.run(1, light=9, large=1)
    assert pool.members == [draining, ready]
    # The kind has room for one more beside the worker that does not end.
    pool.run(1, light=9, large=1)
    assert pool.sizes == {"wide": 1, "tiny": 0, "both": 1}
    said = [one.reason for one in pool.loop.controller.decisions]
    assert said[-2].startswith("both: no place yet")
    assert said[-1].startswith("hire both: ")


def test_a_place_counts_once_while_it_changes_its_offer() -> None:
    draining = member("wide-0", PoolMemberPhase.DRAINING, wanted=False)
    ready = member("wide-1", PoolMemberPhase.READY)
    pool = MemberLoop({"wide": 1, "both": 1}, draining, ready, waiting("both-0", "p-wide-0"))
    pool.run(2, light=9, large=3)
    assert pool.workers.of_kind("big", pool.sizes, "both") == 2
    assert pool.workers.leaving
    pool.members = [ready, member("both-0", PoolMemberPhase.LOADING)]
    pool.run(1, light=9, large=3)
    assert pool.workers.of_kind("big", pool.sizes, "both") == 2
    assert not pool.workers.leaving


def test_a_switch_is_told_to_the_pool_as_one() -> None:
    pool = MemberLoop(
        {"wide": 2}, member("wide-0", PoolMemberPhase.READY), member("wide-1", PoolMemberPhase.READY)
    )
    pool.run(20, light=9, large=2)
    assert pool.switches == [("wide", "both")]
    assert pool.sizes == {"wide": 1, "tiny": 0, "both": 1}


FILE = """
kinds.one = { price = 1.0, most = 1 }
offers = [{ name = "a", kind = "one", model = "m" }, { name = "b", kind = "one", model = "n" }]
"""


def test_nothing_is_decided_before_the_workers_that_run_are_known() -> None:
    """Incident: an operator's order came first. Both workers of the switch ran in one place."""
    bench = Bench(0)
    sizes = SizesWanted({"a": 1, "b": 0}, "1 already running")
    bench.feed(sizes)
    fed: list[Any] = []
    read = AutoscalerSettings(pool_file=PoolFile.parse(FILE), pool_name="local")
    control = control_of(
        read, sizes, bench.pool, fed.append, lambda one, then: then(answer_to(one), bench.now)
    )
    control.ordered(PoolOrders(pool="local", override=1), bench.now)
    load: dict[str, Any] = {"rho_max": 0, "waiting": 1, "capacity": 0, "workers": 0}

    def report() -> None:
        bench.now += 1.0
        control.on_feedback(LoadFeedback(model="n", required=1, at=bench.now, **load), bench.now)
        control.tick(bench.pool.members.values(), bench.now)

    for _ in range(20):
        report()
    assert fed == []
    bench.list_members(RunningWorker("local-a-0", "wrk_9"))
    bench.report("wrk_9")
    for _ in range(20):
        report()
    assert [(one.sizes, one.switches) for one in fed] == [({"a": 0, "b": 1}, PAIR)]

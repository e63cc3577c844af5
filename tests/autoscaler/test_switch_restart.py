"""A switch of offers in the midst of which the autoscaler restarts: the place is the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.autoscaler.autoscaler_bench import Bench, row
from turboserve.autoscaler.control.composition_goal import answer_to
from turboserve.autoscaler.messages import Drain, Release, Reserve, RunningWorker, SizesWanted
from turboserve.autoscaler.pool_file import PoolFile
from turboserve.autoscaler.pool_start import control_of
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.contracts.pool import LoadFeedback, PoolOrders
from turboserve.contracts.workers import WorkerPhase

FILE = """
kinds.one = {{ price = 1.0, most = {most} }}
offers = [{{ name = "a", kind = "one", model = "m" }}, {{ name = "b", kind = "one", model = "n" }}]
"""
DRAINING = "wrk_9"


class RestartedPool(Bench):
    """Pool and controller of a process that began after its predecessor had ordered a worker of `a` to drain.

    The kind has room for `most` workers.
    """

    def __init__(self, most: int) -> None:
        super().__init__(0)
        self.pool.leaving = frozenset({DRAINING})
        sizes = SizesWanted({"a": 0, "b": 0}, "0 already running")
        self.feed(sizes)
        read = AutoscalerSettings(pool_file=PoolFile.parse(FILE.format(most=most)), pool_name="local")
        self.control = control_of(
            read, sizes, self.pool, self.feed, lambda one, then: then(answer_to(one), self.now)
        )
        self.control.ordered(PoolOrders(pool="local"), self.now)
        self.list_members(RunningWorker("local-a-0", DRAINING))
        self.report(DRAINING, WorkerPhase.DRAINING)

    def demand(self, seconds: int, sessions: int) -> None:
        """Let the scheduler report so many sessions of the model of `b` each second."""
        load: dict[str, Any] = {"rho_max": 0, "waiting": 1, "capacity": 0, "workers": 0}
        for _ in range(seconds):
            self.now += 1.0
            self.control.on_feedback(
                LoadFeedback(model="n", required=sessions, at=self.now, **load), self.now
            )
            self.control.tick(self.pool.members.values(), self.now)

    @property
    def places(self) -> Mapping[str, str | None]:
        """The place that each member waits for."""
        return {name: member.waits_for for name, member in self.pool.members.items()}


def test_after_a_restart_the_new_worker_takes_the_place_that_the_switch_frees() -> None:
    """Incident: the kind had room, so a worker was paid for beside the one that still drained."""
    pool = RestartedPool(most=2)
    pool.demand(10, sessions=1)
    assert pool.places == {"local-a-0": None, "local-b-0": "local-a-0"}
    [decision] = pool.control.controller.decisions
    assert decision.reason.startswith("hire b in the place of a worker of a that drains: ")
    pool.do(Drain)
    assert not pool.has(Reserve)
    for _ in range(2):
        pool.list_workers(row(DRAINING, WorkerPhase.DRAINING))
    assert pool.do(Release).worker == DRAINING
    assert pool.do(Reserve).member == "local-b-0"


def test_after_a_restart_a_place_that_stays_taken_is_not_waited_for() -> None:
    pool = RestartedPool(most=3)
    pool.demand(10, sessions=1)
    pool.do(Drain)
    for _ in range(2):
        pool.list_workers(row(DRAINING, WorkerPhase.DRAINING, sessions=1))
    pool.demand(40, sessions=1)
    # The last session of the worker that drains needs one of its own model meanwhile.
    assert pool.places == {"local-a-0": None, "local-a-1": None, "local-b-0": None}
    assert [pool.do(Reserve).member for _ in range(2)] == ["local-a-1", "local-b-0"]


def test_after_a_restart_a_worker_that_drains_gives_its_place_once() -> None:
    pool = RestartedPool(most=3)
    pool.demand(10, sessions=2)
    assert pool.places == {"local-a-0": None, "local-b-0": "local-a-0", "local-b-1": None}
    assert pool.do(Reserve).member == "local-b-1"

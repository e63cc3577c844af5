"""`turboserve bench paper --only calm`: quoted settings with the services' own code, at tiny sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from turboserve.autoscaler.control.events import SessionChange
from turboserve.experiments.agreement.simulated import run_trace
from turboserve.experiments.autoscale.plant import Plant, Resume
from turboserve.experiments.autoscale.sizers import flat_table
from turboserve.experiments.autoscale.trace import Step, WorkloadTrace, checked
from turboserve.experiments.paper import calm, calm_level
from turboserve.experiments.paper.calm_level import ReturnsFirst, core_of
from turboserve.experiments.paper.experiment import Scale
from turboserve.experiments.paper.grids import PoolSetting
from turboserve.experiments.paper.profiles import SESSIONS, cluster
from turboserve.experiments.paper.systems import STUDY
from turboserve.experiments.report.results import RESULTS
from turboserve.experiments.weighted import percentile_of
from turboserve.scheduler.placement import PLACEMENTS, Cluster, Demand, SessionState, WorkerState
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.simulation.world import World

KEYS = {"paper", "ours", "interval", "ratio", "wanted", "met", "declared"}


def small() -> tuple[WorkloadTrace, Plant]:
    """Return ten seconds of three sessions, of which one idles and returns, and one leaves."""
    steps = [Step(0.0, session, SessionChange.ARRIVAL) for session in "ab"]
    steps += [Step(1.0, "c", SessionChange.ARRIVAL), Step(4.0, "a", SessionChange.IDLING)]
    steps += [Step(6.0, "a", SessionChange.ACTIVATION), Step(7.0, "b", SessionChange.DEPARTURE)]
    return checked("small", steps, 10.0), replace(cluster("H20 1.3B", 2.0), most=2)


def both(name: str, setting: PoolSetting, slack: bool = False) -> dict[str, Any]:
    found = calm.Quoted(calm.FIGURE4, *small())
    return calm.both_levels(found, STUDY[name], setting, 0, slack)


class TestLevels:
    def test_a_fixed_pool_costs_the_same(self) -> None:
        found = both("base", PoolSetting(SESSIONS, 2))
        for level in ("calm", "count"):
            assert found[level]["cost_worker_s"] == found[level]["wanted_worker_s"] == 20.0
        assert found["calm"]["late"] == found["count"]["late"] == 0
        assert found["calm"]["refused"] == found["calm"]["violations"] == 0
        assert found["calm"]["sessions"] == 3
        # Viewers take a chunk each 1.5 s and begin with three more, less the idle and the last seconds.
        assert 18 <= found["calm"]["chunks"] <= 30
        # Two of three sessions share a worker most of the time, but their chunks seldom meet.
        assert found["count"]["p50_ms"] == found["count"]["p95_ms"]
        lone_ms = 1000 * small()[1].latency_s[1]
        assert found["calm"]["p50_ms"] == pytest.approx(lone_ms, abs=0.01)

    def test_chunks_wait_for_their_turn(self) -> None:
        steps = [Step(1.0, session, SessionChange.ARRIVAL) for session in "abcdef"]
        found = calm.Quoted(calm.FIGURE4, checked("at once", steps, 6.0), small()[1])
        levels = calm.both_levels(found, STUDY["base"], PoolSetting(SESSIONS, 1), 0, slack=False)
        count, served = levels["count"], levels["calm"]
        assert count["p50_ms"] == count["p95_ms"] == count["served_ms"]
        # All begin at once, so that their first chunks are back to back. Then viewers pace them.
        assert served["p95_ms"] == pytest.approx(count["p95_ms"], rel=0.05)
        assert served["p50_ms"] < count["p50_ms"]

    def test_an_elastic_pool_has_the_capacity_and_the_table_of_its_setting(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worlds: list[World] = []

        def kept(world: World, *given: Any, **named: Any) -> dict[str, Any]:
            worlds.append(world)
            return run_trace(world, *given, **named)

        monkeypatch.setattr(calm_level, "run_trace", kept)
        found = both("joint", PoolSetting(1, rho=0.8, forecast=True))
        # Of three sessions on two workers of one, the third waits until one idles.
        assert found["calm"]["late"] == found["count"]["late"] == 1
        assert found["calm"]["with_waits_ms"] == pytest.approx(found["count"]["with_waits_ms"], rel=0.1)
        [world] = worlds
        assert world.autoscaler is not None
        control = world.autoscaler.control
        assert control is not None
        assert control.orders is not None
        assert control.orders.override is None
        assert control.controller.table == flat_table(0.8, predictive=True)

    def test_slack_exists_in_calm_mode_only(self) -> None:
        found = both("turboserve", PoolSetting(2, rho=0.5), slack=True)
        assert found.keys() == {"setting", "calm"}
        assert 0.95 < found["calm"]["quality"] <= 1
        assert found["calm"]["violations"] == 0

    def test_the_wanted_size_leaves_what_drains_cost(self) -> None:
        assert calm_level.wanted_worker_s(3, [], 10.0) == 30.0
        assert calm_level.wanted_worker_s(3, [[2.0, 4], (6.5, 1)], 10.0) == 6.0 + 18.0 + 3.5


class TestPolicies:
    def test_a_resumed_session_returns_if_there_is_room(self) -> None:
        cluster_ = Cluster()
        for name in ("w1", "w2"):
            cluster_.put_worker(WorkerState(name, "m", 1))
        cluster_.put_session(SessionState("idle", "m", "w2", suspended=True))
        demand = Demand("idle", "m", "resume", holder="w2")
        placement = ReturnsFirst(PLACEMENTS.make("least-loaded"))
        assert [choice.worker for choice in placement.assign(cluster_, [demand])] == ["w2"]
        cluster_.put_session(SessionState("other", "m", "w2"))
        new = Demand("new", "m", "place")
        assert [choice.worker for choice in placement.assign(cluster_, [demand, new])] == ["w1", None]

    @pytest.mark.parametrize(
        ("name", "rebalances"), [("base", False), ("migration", True), ("turboserve", True)]
    )
    def test_a_system_migrates_as_at_the_level_of_counts(self, name: str, rebalances: bool) -> None:
        system = STUDY[name]
        core = core_of(system, Resume.BY_POLICY, SchedulerSettings(placement=system.placement))
        assert core.policy.rebalance == rebalances
        returning = core_of(system, Resume.RETURNS, SchedulerSettings(placement=system.placement))
        assert isinstance(returning.placement, ReturnsFirst)


class TestReport:
    def test_a_report_has_both_levels_and_their_difference(self) -> None:
        count = {"cost_worker_s": 100.0, "mean_ms": 200.0, "p50_ms": 200.0, "p95_ms": 300.0,
                 "with_waits_ms": 300.0, "migrations": 0, "late": 0, "activations": 50}  # fmt: skip
        served = {
            **count,
            "cost_worker_s": 101.0,
            "wanted_worker_s": 99.5,
            "late": 1,
            "quality": 0.99,
            "stall_s": 0.1,
            "violations": 0,
        }
        results: dict[Any, Any] = {}
        scale = Scale(quick=True)
        for cell in calm.cells(scale):
            name = cell.arguments[1]
            results[cell] = {"setting": "8 workers", "count": count, "calm": served}
            if name == calm.SLACK:
                results[cell] = {"setting": "8 workers", "calm": served}
            if name == "autoscaling":
                results[cell] = {"setting": None}
        report = calm.report(scale, results)
        assert report.keys() == {*KEYS, "draws"}
        assert report["draws"] == 1
        base = report["ours"][calm.FIGURE4]["base"]
        assert base["difference_percent"]["cost_worker_s"]["mean"] == pytest.approx(1.0)
        assert base["difference_percent"]["migrations"] is None
        assert base["calm"]["wanted_worker_s"]["mean"] == pytest.approx(99.5)
        assert "wanted_worker_s" not in base["count"]
        assert report["interval"]["largest_late_difference_percent"]["mean"] == pytest.approx(2.0)
        assert report["met"] == {"cost_difference_percent": True, "late_difference_percent": False}
        slow = report["ours"][calm.FIGURE4]["autoscaling"]
        assert slow["draws_without_a_setting"] == 1
        shown = calm.rows(report)
        assert ("autoscaling; figure 4", "", "no setting is fast enough") in shown
        texts = {what: ours for what, _, ours in shown}
        assert "quality 0.990" in texts[f"{calm.SLACK}; figure 4"]
        sentences = [result.sentence for result in RESULTS[calm.NAME](report)]
        assert (
            "Cost in calm mode, base, figure 4: 101 worker-s is equal to the count-level replay's 100 "
            "worker-s." in sentences
        )
        assert len({cell.digest for cell in results}) == len(results) == len(STUDY) + 1

    def test_a_percentile_is_of_session_seconds(self) -> None:
        seconds = dict(enumerate([0.0, 6.0, 3.0, 1.0]))
        found = [percentile_of(seconds, share) for share in (0.5, 0.6, 0.85, 0.95)]
        assert found == [1, 1, 2, 3]

"""The autoscaling controller with a pool that follows with a delay, on a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turboserve.autoscaler.control.controller import Controller
from turboserve.autoscaler.control.events import (
    ControlTick,
    DryRunSet,
    FeedbackReceived,
    PoolObserved,
    ScalingAction,
    SessionChange,
    SessionChanged,
    SizeOverridden,
    TableReplaced,
)
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.autoscaler.status import scaling_status
from turboserve.contracts.autoscale import LevelParameters, ProfileTable, Provenance, ScalingStatus
from turboserve.contracts.pool import LoadFeedback

K = 5
TABLE = ProfileTable(
    levels=(
        LevelParameters(
            level=1, volatility_from=0, volatility_to=1, latency_weight=0.2, target_utilization=0.8
        ),
        LevelParameters(
            level=2, volatility_from=1, volatility_to=3, latency_weight=0.2, target_utilization=0.65
        ),
        LevelParameters(level=3, volatility_from=3, latency_weight=0.2, target_utilization=0.4),
    ),
    provenance=Provenance(source="test"),
)
POLICY = ControlPolicy(least=1, most=20, capacity=K)


def report(required: int, workers: int, at: float) -> LoadFeedback:
    """Return the report of a scheduler with even placement."""
    placed = min(required, K * workers)
    return LoadFeedback(
        model="m",
        rho_max=math.ceil(placed / workers) / K if workers else 0.0,
        required=required,
        waiting=required - placed,
        capacity=K * workers,
        workers=workers,
        at=at,
    )


class World:
    """Demand, and a pool whose workers are ready `delay_s` after they are requested."""

    def __init__(
        self, policy: ControlPolicy = POLICY, target: int = 1, delay_s: float = 10.0, demand: int = 0
    ) -> None:
        self.controller = Controller(policy, TABLE, target)
        self.delay_s = delay_s
        self.now = 0.0
        self.ready = target
        self.coming: list[float] = []
        self.changes: list[tuple[float, int, int]] = []
        self.demand = demand

    def run(self, seconds: float, demand: Callable[[float], int], heard: bool = True) -> World:
        ends = self.now + seconds
        while self.now < ends:
            self.now += 1.0
            before, self.demand = self.demand, demand(self.now)
            if self.demand > before:
                self.send(SessionChanged(SessionChange.ARRIVAL, self.demand - before))
            self.ready += sum(at <= self.now for at in self.coming)
            self.coming = [at for at in self.coming if at > self.now]
            self.send(PoolObserved(self.ready, len(self.coming)))
            self.send(FeedbackReceived(report(self.demand, self.ready, self.now)) if heard else ControlTick())
        return self

    def send(self, event: object) -> None:
        before = self.controller.target
        decision = self.controller.handle(event, self.now)  # type: ignore[arg-type]
        target = self.controller.target
        assert (decision is None and target == before) or (
            decision is not None and (decision.previous, decision.target) == (before, target)
        )
        if target != before:
            self.changes.append((self.now, before, target))
            missing = target - self.ready - len(self.coming)
            self.coming += [self.now + self.delay_s] * missing
            if missing < 0:
                kept = max(len(self.coming) + missing, 0)
                self.ready -= max(-missing - len(self.coming), 0)
                self.coming = self.coming[:kept]


@given(
    demand=st.integers(0, 70),
    start=st.integers(1, 20),
    delay_s=st.floats(0.5, 90.0),
    predictive=st.booleans(),
    hysteresis=st.sampled_from([0.02, 0.1, 0.2]),
)
@settings(max_examples=8, deadline=None)
def test_constant_load_takes_at_most_two_actions(
    demand: int, start: int, delay_s: float, predictive: bool, hysteresis: float
) -> None:
    policy = ControlPolicy(most=20, capacity=K, predictive=predictive, hysteresis=hysteresis)
    world = World(policy, start, delay_s).run(3600, lambda _: demand)
    # One step at the beginning: out while the first sessions make the level high, or in after the window.
    assert len(world.changes) <= 2
    assert K * world.controller.target >= demand


def test_a_square_wave_is_followed_out_and_in() -> None:
    world = World(ControlPolicy(most=20, capacity=K), 4).run(3600, lambda t: 40 if t % 1200 < 600 else 4)
    assert {after > before for _, before, after in world.changes} == {True, False}


@given(
    low=st.integers(0, 30),
    high=st.integers(0, 80),
    period=st.integers(2, 400),
    delay_s=st.floats(1.0, 60.0),
    out_s=st.floats(0.0, 60.0),
    in_s=st.floats(0.0, 120.0),
)
@settings(max_examples=15, deadline=None)
def test_a_square_wave_undoes_nothing_within_a_cooldown(
    low: int, high: int, period: int, delay_s: float, out_s: float, in_s: float
) -> None:
    policy = ControlPolicy(most=20, capacity=K, out_cooldown_s=out_s, in_cooldown_s=in_s, in_window_s=in_s)
    world = World(policy, 4, delay_s).run(1200, lambda t: high if t % period < period / 2 else low)
    for (t0, a0, b0), (t1, a1, b1) in zip(world.changes, world.changes[1:], strict=False):
        if b0 > a0 and b1 < a1:
            assert t1 - t0 >= in_s, "a scale-out was undone within the cool-down"
        if b0 < a0 and b1 > a1:
            assert t1 - t0 >= out_s, "a scale-in was undone within the cool-down"


def test_a_slow_square_wave_is_followed_in_both_directions() -> None:
    """So the property above is not about a controller that changes nothing."""
    policy = ControlPolicy(most=20, capacity=K, out_cooldown_s=10.0, in_cooldown_s=20.0, in_window_s=20.0)
    world = World(policy, 4, 5.0).run(1200, lambda t: 60 if t % 400 < 200 else 5)
    changes = [after - before for _, before, after in world.changes]
    assert max(changes) > 0 > min(changes)


events = st.one_of(
    st.just(ControlTick()),
    st.builds(SessionChanged, st.sampled_from(SessionChange), st.integers(1, 30)),
    st.builds(PoolObserved, st.integers(0, 20), st.integers(0, 20), st.integers(0, 3)),
    st.builds(
        lambda rho, required, waiting, workers, at: FeedbackReceived(
            LoadFeedback.model_construct(
                None, model="m", rho_max=rho, required=required, waiting=waiting,
                capacity=K * workers, workers=workers, decisions=0, at=at,
            )
        ),
        st.sampled_from([math.nan, math.inf, 0.0, 0.2, 0.8, 1.0]),
        st.integers(0, 100),
        st.integers(0, 5),
        st.integers(0, 20),
        st.floats(0, 1000),
    ),
)  # fmt: skip


@given(
    steps=st.lists(st.tuples(st.floats(0.0, 40.0), events), max_size=120),
    start=st.integers(1, 20),
    zero=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_only_fresh_feedback_without_a_gap_ever_shrinks_the_pool(
    steps: list[tuple[float, object]], start: int, zero: bool
) -> None:
    policy = ControlPolicy(
        least=0 if zero else 1, most=20, capacity=K, scale_to_zero=zero, in_window_s=20.0,
        in_cooldown_s=20.0, zero_after_s=30.0,
    )  # fmt: skip
    controller = Controller(policy, TABLE, start)
    now = 0.0
    for wait, event in steps:
        now += wait
        before = controller.target
        controller.handle(event, now)  # type: ignore[arg-type]
        assert 0 <= controller.target <= policy.most
        if not zero:
            assert controller.target >= 1
        if controller.target < before:
            hearing = controller.advisor.feedback_monitor
            assert hearing.heard_at is not None
            assert now - hearing.heard_at <= policy.stale_s
            assert hearing.since is not None
            assert now - hearing.since >= policy.in_window_s
            assert hearing.feedback is not None
            assert hearing.feedback.required <= K * controller.target


@given(st.lists(st.tuples(st.floats(0.0, 40.0), events), max_size=60))
@settings(max_examples=40, deadline=None)
def test_the_same_events_give_the_same_decisions(steps: list[tuple[float, object]]) -> None:
    def run_scenario() -> list[object]:
        controller, now = Controller(POLICY, TABLE, 3), 0.0
        said: list[object] = []
        for wait, event in steps:
            now += wait
            said.append(controller.handle(event, now))  # type: ignore[arg-type]
        return said

    assert repr(run_scenario()) == repr(run_scenario())


def test_it_scales_out_at_once_to_what_the_formula_says() -> None:
    world = World(target=1).run(1, lambda _: 12)
    # Twelve at once are a burst: level 2, ρ̂ 0.65.
    assert world.changes == [(1.0, 1, math.ceil(12 / (5 * 0.65)))]
    decision = world.controller.decisions[-1]
    assert decision.action is ScalingAction.OUT
    assert "12 / (5 × 0.65)" in decision.reason
    assert decision.numbers["level"] == 2
    assert decision.numbers["required"] == 12


def test_starting_workers_are_not_ordered_twice() -> None:
    world = World(target=1, delay_s=120.0).run(119, lambda _: 12)
    assert len(world.changes) == 1
    assert world.ready == 1


def test_inside_the_band_nothing_happens() -> None:
    world = World(target=4, demand=16).run(200, lambda _: 16).run(200, lambda t: 14 + int(t) % 3)
    assert world.changes == []


def test_a_dip_shorter_than_the_window_does_not_shrink_the_pool() -> None:
    world = World(target=5, demand=17).run(200, lambda _: 17).run(POLICY.in_window_s - 5, lambda _: 2)
    assert world.changes == []
    world.run(10, lambda _: 2)
    assert [change[1:] for change in world.changes] == [(5, 4)]


def test_waves_faster_than_a_start_up_are_held_through() -> None:
    """A pause shorter than a start-up saves less than the next start costs."""
    wave = lambda t: 40 if t % 20 < 10 else 10  # noqa: E731
    world = World(target=10, demand=40).run(600, wave)
    early = len(world.changes)
    world.run(1200, wave)
    assert len(world.changes) == early <= 6
    slow = World(target=10, demand=40).run(1800, lambda t: 40 if t % 200 < 100 else 10)
    assert len(slow.changes) >= 9, "slow ones are followed"


def test_room_for_the_recent_peak_is_kept_with_all_workers_full() -> None:
    world = World(target=5, demand=17).run(200, lambda _: 17).run(POLICY.peak_window_s - 5, lambda _: 2)
    assert world.controller.target == 4, "4 × 5 slots hold the 17 of a moment ago"
    assert "and the peak of 17 in the last 120 s" in world.controller.decisions[-1].reason
    world.run(10, lambda _: 2)
    assert world.controller.target == 1


@pytest.mark.parametrize(("ordered", "counts"), [(None, True), (True, True), (False, False)])
def test_the_table_says_at_which_levels_the_forecast_counts(ordered: bool | None, counts: bool) -> None:
    rows = tuple(row.model_copy(update={"predictive": row.level == 2}) for row in TABLE.levels)
    table = ProfileTable(levels=rows, provenance=TABLE.provenance)
    controller = Controller(ControlPolicy(most=20, capacity=K, predictive=ordered), table, 1)
    assert controller.advisor.predictive is bool(ordered)
    controller.handle(SessionChanged(SessionChange.ARRIVAL, 8), 0.5)
    controller.handle(FeedbackReceived(report(8, 1, 0.6)), 0.6)
    assert controller.advisor.row.level == 2
    assert controller.advisor.predictive is counts


def test_a_full_worker_is_a_reason_to_grow_whatever_the_band() -> None:
    dense = TABLE.levels[2].model_copy(
        update={"level": 1, "volatility_from": 0.0, "target_utilization": 0.95}
    )
    controller = Controller(POLICY, ProfileTable(levels=(dense,), provenance=TABLE.provenance), 3)
    controller.handle(FeedbackReceived(report(15, 3, 1.0)), 1.0)
    assert controller.target == 4
    assert "a worker is full" in controller.decisions[-1].reason


def test_one_full_worker_of_capacity_one_does_not_keep_the_others() -> None:
    controller = Controller(ControlPolicy(most=9, capacity=1), TABLE, 5)
    for second in range(200):
        feedback = LoadFeedback(
            model="m", rho_max=1.0, required=1, waiting=0, capacity=5, workers=5, at=second
        )
        controller.handle(FeedbackReceived(feedback), float(second))
    assert controller.target == 2


def test_consolidation_is_checked_against_the_workers_that_serve() -> None:
    """Four workers are wanted and two serve: the two that start may be given up, but no more."""
    controller = Controller(POLICY, TABLE, 4)
    for second in range(200):
        controller.handle(FeedbackReceived(report(6, 2, second)), float(second))
    assert controller.target == 2


def test_the_limit_is_said() -> None:
    world = World(ControlPolicy(most=3, capacity=K)).run(30, lambda _: 40)
    assert world.controller.target == 3
    assert "the maximum size is 3" in world.controller.decisions[-1].reason


def test_silence_holds_the_pool_and_says_so() -> None:
    world = World(target=4, demand=16).run(100, lambda _: 16).run(1000, lambda _: 0, heard=False)
    assert world.changes == []
    assert "not scaling in" in world.controller.decisions[-1].reason
    assert scaling_status(world.controller, world.now, 1e9).stale


def test_an_override_is_obeyed_until_it_is_taken_back() -> None:
    world = World(target=2, demand=8).run(10, lambda _: 8)
    world.send(SizeOverridden(7, "alice"))
    world.run(300, lambda _: 8)
    assert world.controller.target == 7
    assert world.controller.mode == "override"
    assert world.controller.advice == 2, "it goes on saying what it would do"
    world.send(SizeOverridden(None, "alice"))
    world.run(300, lambda _: 8)
    assert world.controller.target == 2
    assert any("alice" in decision.reason for decision in world.controller.decisions)


def test_a_dry_run_only_explains() -> None:
    world = World(ControlPolicy(most=20, capacity=K, dry_run=True), target=2).run(300, lambda _: 30)
    assert world.changes == []
    assert world.controller.advice == 8
    assert any("dry run; otherwise out, 2 → " in d.reason for d in world.controller.decisions)
    world.send(DryRunSet(False))
    world.run(2, lambda _: 30)
    assert world.controller.target == 8


class TestScaleToZero:
    POLICY = ControlPolicy(least=0, most=4, capacity=K, scale_to_zero=True, zero_after_s=120.0)

    def test_it_stops_after_a_long_idle_time_and_starts_with_the_first_session(self) -> None:
        world = World(self.POLICY, target=2).run(100, lambda _: 4).run(100, lambda _: 0)
        assert world.controller.target == 1
        world.run(100, lambda _: 0)
        assert world.controller.target == 0
        world.send(SessionChanged(SessionChange.ARRIVAL))
        assert world.controller.target == 1
        assert world.controller.decisions[-1].action is ScalingAction.WAKE

    def test_it_wakes_by_the_feedback_alone(self) -> None:
        controller = Controller(self.POLICY, TABLE, 0)
        controller.handle(FeedbackReceived(report(9, 0, 1.0)), 1.0)
        assert controller.target == 3

    def test_it_stays_for_suspended_sessions(self) -> None:
        controller = Controller(self.POLICY, TABLE, 1)
        controller.handle(PoolObserved(1, 0, suspended=1), 0.0)
        for second in range(400):
            controller.handle(FeedbackReceived(report(0, 1, second)), float(second))
        assert controller.target == 1

    def test_without_it_the_last_worker_stays(self) -> None:
        world = World(ControlPolicy(most=4, capacity=K), target=3).run(2000, lambda _: 0)
        assert world.controller.target == 1


def test_another_table_is_in_force_from_the_next_decision_on() -> None:
    world = World(target=4, demand=16).run(100, lambda _: 16)
    sparse = TABLE.levels[2].model_copy(update={"level": 1, "volatility_from": 0.0})
    world.send(TableReplaced(ProfileTable(levels=(sparse,), provenance=Provenance(source="new"))))
    assert world.controller.decisions[-1].action is ScalingAction.TABLE
    world.run(5, lambda _: 16)
    assert world.controller.target == 8


def test_the_forecast_is_a_lower_bound_on_a_ramp() -> None:
    ramp = lambda t: int(t / 2)  # noqa: E731
    reactive = World(ControlPolicy(most=20, capacity=K, horizon_s=20.0)).run(120, ramp)
    ahead = World(ControlPolicy(most=20, capacity=K, horizon_s=20.0, predictive=True)).run(120, ramp)
    assert ahead.controller.target > reactive.controller.target
    status = scaling_status(ahead.controller, ahead.now, 1e9)
    assert status.forecast is not None
    assert status.forecast > 60


def test_the_status_says_what_the_table_was_not_profiled_for() -> None:
    here = Controller(POLICY, TABLE, 1)
    assert scaling_status(here, 0.0, 1e9).table_differs == ()
    other = POLICY.dynamics | {"in_window_s": POLICY.in_window_s + 50}
    provenance = Provenance(source="elsewhere", controller=other, capacity=K + 1)
    here.handle(TableReplaced(ProfileTable(levels=TABLE.levels, provenance=provenance)), 0.0)
    assert scaling_status(here, 0.0, 1e9).table_differs == ("in_window_s", "capacity")


def test_the_status_survives_the_wire() -> None:
    world = World(target=1).run(30, lambda _: 12)
    status = scaling_status(world.controller, world.now, 1e9)
    assert ScalingStatus.from_bytes(status.to_bytes()) == status
    assert status.decisions[0].at == pytest.approx(1e9 - 29)
    assert status.level == 2

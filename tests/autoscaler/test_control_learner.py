"""The learned headroom: virtual pools against the simulation, choices, explanations, and any input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turboserve.autoscaler.control.controller import Controller
from turboserve.autoscaler.control.events import (
    FeedbackReceived,
    PoolObserved,
    ScalingAction,
    TableReplaced,
)
from turboserve.autoscaler.control.learned_state import LearnedStateError
from turboserve.autoscaler.control.learner import MEMORY_S, HeadroomLearner, candidates
from turboserve.autoscaler.control.policy import ControlPolicy, default_table
from turboserve.autoscaler.control.start_up import StartUpMeter
from turboserve.autoscaler.control.virtual_pool import VirtualController, VirtualPool
from turboserve.contracts.pool import LEARNED_LIMIT, LoadFeedback
from turboserve.experiments.autoscale.bursts import clustered
from turboserve.experiments.autoscale.counted import counted, instants
from turboserve.experiments.autoscale.plant import Plant, policy_for
from turboserve.experiments.autoscale.simulation import Simulation
from turboserve.experiments.autoscale.sizers import Controlled

POLICY = ControlPolicy(most=20, capacity=5, learns=True)


@pytest.mark.parametrize("number", [0, 3, 8])
def test_a_virtual_pool_costs_what_the_simulation_costs(number: int) -> None:
    """The simulation has workers, placement, drains and migrations; the virtual pool only has counts."""
    trace, plant = clustered(3, 240.0), Plant(most=32)
    headroom = candidates(policy_for(plant))[number]
    policy = policy_for(plant, peak_window_s=headroom.peak_window_s, quantile=headroom.quantile)
    table = default_table().model_copy(update={"levels": (headroom.row,)})
    run = Simulation(trace, plant, Controlled(policy, table, 8)).run()
    controller = VirtualController(policy, headroom, 8, 0.0)
    for each in instants(trace):
        controller.step(each.active, plant.capacity, each.at)
    controller.pool.advance(trace.ends_s)
    assert controller.pool.cost_s == pytest.approx(run.cost_s, rel=0.01)
    assert controller.pool.late == pytest.approx(run.late_first, abs=max(2, 0.05 * run.placed))
    # The replay of counts reports as the simulation does, and so sizes the pool as it does.
    replayed = counted(trace, plant, Controlled(policy, table, 8))
    assert replayed.cost_s == pytest.approx(run.cost_s, rel=0.01)
    assert replayed.late == pytest.approx(run.late_first, abs=max(2, 0.05 * run.placed))


def test_a_virtual_pool_counts_workers_and_waits() -> None:
    pool = VirtualPool(1, 5, 10.0, 0.5, 0.0)
    pool.demand(7, 1.0)
    assert (pool.waiting, pool.late) == (2, 0)
    pool.resize(2, 1.0)
    assert (pool.ready, pool.starting) == (1, 1)
    pool.demand(6, 1.2)
    assert (pool.waiting, pool.late) == (1, 0), "who leaves in time was not late"
    pool.advance(21.0)
    assert (pool.ready, pool.waiting, pool.late) == (2, 0, 1)
    assert pool.cost_s == pytest.approx(1 + 2 * 20)
    pool.resize(1, 21.0)
    assert (pool.ready, pool.waiting) == (1, 1)


def feed(
    learner: HeadroomLearner, seconds: range, required: int, every: int = 0, burst: int = 0
) -> list[int]:
    """Feed a constant demand, with a burst for 30 s every so many seconds. Returns the choices."""
    chosen = []
    for second in seconds:
        more = burst if every and second % every < 30 else 0
        if learner.observe(required + more, 5, 10.0, float(second)):
            chosen.append(learner.chosen)
    return chosen


def test_calm_demand_teaches_little_headroom() -> None:
    learner = HeadroomLearner(POLICY, 8)
    learner.chosen = next(
        i for i, each in enumerate(learner.candidates) if each.row.target_utilization == 0.6
    )
    assert feed(learner, range(600), 20)
    assert learner.headroom.row.target_utilization == 1.0
    assert "would have cost" in learner.reason


def test_bursts_that_no_forecast_sees_teach_headroom() -> None:
    learner = HeadroomLearner(replace(POLICY, lateness_price_s=1000.0, peak_window_s=40.0), 8)
    feed(learner, range(2400), 10, every=240, burst=9)
    calm = HeadroomLearner(replace(POLICY, lateness_price_s=1000.0, peak_window_s=40.0), 8)
    feed(calm, range(2400), 10)
    assert learner.headroom.row.target_utilization < calm.headroom.row.target_utilization


def test_a_higher_price_never_chooses_more_lateness() -> None:
    late = []
    for price_s in (0.0, 60.0, 1000.0):
        learner = HeadroomLearner(replace(POLICY, lateness_price_s=price_s), 8)
        feed(learner, range(1800), 10, every=200, burst=12)
        late.append(learner.sums[learner.chosen].late)
    assert late == sorted(late, reverse=True)


def test_too_little_is_not_learned_from() -> None:
    learner = HeadroomLearner(POLICY, 8)
    assert feed(learner, range(290), 10, every=50, burst=30) == []
    assert learner.chosen == 0
    assert feed(learner, range(290, 400), 10, every=50, burst=30) != []


def test_the_first_choice_depends_on_the_start_up() -> None:
    for start_up_s, ahead in ((2.0, True), (10.0, False), (60.0, False)):
        learner = HeadroomLearner(replace(POLICY, horizon_s=start_up_s), 8)
        assert learner.headroom.row.predictive == ahead
    # The order of the candidates says which is first. Their sums do not fit another order.
    orders = [candidates(replace(POLICY, horizon_s=start_up_s)) for start_up_s in (2.0, 10.0)]
    assert set(orders[0]) == set(orders[1])
    assert orders[0] != orders[1]


def test_an_order_about_the_forecast_bounds_the_candidates() -> None:
    for ordered in (True, False):
        assert {each.row.predictive for each in candidates(replace(POLICY, predictive=ordered))} == {ordered}


def feedback(required: int, workers: int, at: float) -> LoadFeedback:
    waiting = max(required - 5 * workers, 0)
    rho = min(required / (5 * workers), 1.0)
    return LoadFeedback(
        model="m",
        rho_max=rho,
        required=required,
        waiting=waiting,
        capacity=5 * workers,
        workers=workers,
        at=at,
    )


def test_the_controller_explains_what_it_learned_and_an_operators_table_takes_precedence() -> None:
    controller = Controller(POLICY, default_table(), 8)
    assert controller.learner is not None
    low = next(i for i, e in enumerate(controller.learner.candidates) if e.row.target_utilization == 0.6)
    controller.learner.chosen = low
    for second in range(600):
        controller.handle(PoolObserved(controller.target), float(second))
        controller.handle(FeedbackReceived(feedback(20, controller.target, float(second))), float(second))
    learned = [each for each in controller.decisions if each.action is ScalingAction.TABLE]
    assert "learned from" in learned[-1].reason
    assert learned[-1].numbers["lateness_price_s"] == 60
    assert controller.target == 4
    assert controller.advisor.row.target_utilization == 1.0
    other = default_table().model_copy(update={"levels": default_table().levels[-1:]})
    other = other.model_copy(
        update={"levels": (other.levels[0].model_copy(update={"level": 1, "volatility_from": 0.0}),)}
    )
    controller.handle(TableReplaced(other), 600.0)
    controller.handle(FeedbackReceived(feedback(20, 4, 601.0)), 601.0)
    assert not controller.learning
    assert controller.advisor.row == other.levels[0]


def test_what_was_learned_outlives_the_process() -> None:
    before = Controller(POLICY, default_table(), 8)
    assert before.remember(0.0) is None, "nothing was seen yet"
    assert before.learner is not None
    before.start_up.restore((20.0, 30.0))
    for second in range(600):
        before.handle(PoolObserved(before.target), float(second))
        required = 30 if second % 120 < 20 else 10
        before.handle(FeedbackReceived(feedback(required, before.target, float(second))), float(second))
    text = before.remember(5_000.0)
    assert text is not None
    assert len(text) < LEARNED_LIMIT / 4
    after = Controller(POLICY, default_table(), 8)
    assert after.learner is not None
    # The next process has another monotonic clock, and starts ten minutes later.
    after.recall(text, 5_600.0)
    assert after.learner.headroom == before.learner.headroom
    assert after.learner.seen_s == before.learner.seen_s >= 590
    assert after.start_up.value_s == 25
    for ours, theirs in zip(after.learner.sums, before.learner.sums, strict=True):
        assert ours.cost_s == pytest.approx(theirs.cost_s * math.exp(-600 / MEMORY_S))
        assert ours.late == pytest.approx(theirs.late * math.exp(-600 / MEMORY_S))
    assert max(each.late for each in after.learner.sums) > 0
    # It goes on from there: the sums grow by what is seen now.
    costs = [each.cost_s for each in after.learner.sums]
    for second in range(60):
        after.handle(FeedbackReceived(feedback(20, 8, float(second))), float(second))
    assert all(each.cost_s > cost for each, cost in zip(after.learner.sums, costs, strict=True))
    # A wall clock that was set back does not let the sums grow.
    again = Controller(POLICY, default_table(), 8)
    again.recall(text, 100.0)
    assert again.learner is not None
    assert [each.cost_s for each in again.learner.sums] == [each.cost_s for each in before.learner.sums]


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda text: "", "JSON"),
        (lambda text: text[:-9], "JSON"),
        (lambda text: text.replace('"version":1', '"version":2'), "version"),
        (lambda text: text.replace('"chosen":0', '"chosen":99'), "candidates"),
        (lambda text: text.replace('"cost_s":', '"cost_s":-', 1), "sums.0.cost_s"),
        (lambda text: text.replace('"conditions":"', '"conditions":"x'), "other settings"),
        (lambda text: text + " " * LEARNED_LIMIT, "characters"),
    ],
)
def test_a_broken_or_old_state_changes_nothing(broken: Callable[[str], str], says: str) -> None:
    before = Controller(POLICY, default_table(), 8)
    for second in range(30):
        before.handle(FeedbackReceived(feedback(20, 8, float(second))), float(second))
    text = before.remember(5_000.0)
    assert text is not None
    after = Controller(POLICY, default_table(), 8)
    assert after.learner is not None
    with pytest.raises(LearnedStateError, match=says):
        after.recall(broken(text), 5_000.0)
    assert after.learner.seen_s == 0
    assert all(each.cost_s == 0 for each in after.learner.sums)
    after.recall(text, 5_000.0)
    assert after.learner.seen_s > 0


def test_sums_of_other_settings_are_not_continued() -> None:
    before = Controller(POLICY, default_table(), 8)
    for second in range(30):
        before.handle(FeedbackReceived(feedback(20, 8, float(second))), float(second))
    text = before.remember(5_000.0)
    assert text is not None
    for other in (replace(POLICY, most=POLICY.most + 1), replace(POLICY, peak_window_s=60.0)):
        with pytest.raises(LearnedStateError, match="other settings"):
            Controller(other, default_table(), 8).recall(text, 5_000.0)
    # The price of lateness is no part of the sums.
    Controller(replace(POLICY, lateness_price_s=7.0), default_table(), 8).recall(text, 5_000.0)
    Controller(replace(POLICY, learns=False), default_table(), 8).recall("ignored", 5_000.0)


def test_start_ups_are_measured() -> None:
    meter = StartUpMeter(10.0)
    assert meter.value_s == 10
    for at, ready, starting in ((0, 1, 0), (1, 1, 2), (31, 2, 1), (33, 2, 0), (40, 2, 1), (45, 3, 0)):
        meter.observe(PoolObserved(ready, starting), float(at))
    assert meter.value_s == pytest.approx((30 + 5) / 2), "the start that was cancelled does not count"


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.floats(-5, 90), st.integers(0, 10**9), st.integers(1, 10**6)), max_size=60),
    st.floats(0, 1e6),
    st.floats(0, 3600),
)
def test_no_demand_ends_the_learner_and_its_choice_is_repeatable(
    history: list[tuple[float, int, int]], price_s: float, start_up_s: float
) -> None:
    policy = replace(POLICY, lateness_price_s=price_s)
    ours, again = HeadroomLearner(policy, 3), HeadroomLearner(policy, 3)
    now = 0.0
    for pause_s, required, capacity in history:
        now += pause_s
        first = ours.observe(required, capacity, start_up_s, now)
        assert again.observe(required, capacity, start_up_s, now) == first
        assert again.chosen == ours.chosen
        assert all(math.isfinite(value) for value in ours.numbers().values())
        assert all(controller.pool.target <= policy.most for controller in ours._controllers)
        assert all(sums.cost_s >= 0 and sums.late >= 0 for sums in ours.sums)


def test_feedback_that_is_not_validated_has_all_fields_and_is_valid() -> None:
    pool = VirtualPool(2, 5, 10.0, 0.5, 0.0)
    pool.demand(13, 1.0)
    found = pool.feedback(1.0)
    assert found.waiting == 3
    assert vars(found).keys() == LoadFeedback.model_fields.keys()
    assert LoadFeedback(**{**vars(found), "model": "m"}) == found.model_copy(update={"model": "m"})
    trace = clustered(1)
    simulation = Simulation(trace, Plant(), Controlled(policy_for(Plant()), default_table(), 2))
    simulation.advance(60.0)
    found = simulation.fleet.feedback(60.0)
    assert found.required > 0
    assert vars(found).keys() == LoadFeedback.model_fields.keys()
    assert LoadFeedback(**vars(found)) == found

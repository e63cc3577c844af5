"""Forecasts by behavior over the real arrivals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turboserve.experiments.autoscale.behavior import KINDS, SAMPLES, TRACES, refusals
from turboserve.experiments.autoscale.departure_times import ExpectedTimes, expected_times, favor_behavior
from turboserve.state_store.core.behavior_learner import LEAST_COMPARED, BehaviorLearner, ForecastErrors
from turboserve.state_store.core.departures import STEP_S, ExpectedDepartures


def test_where_all_behave_alike_the_forecast_is_the_one_of_the_last_minutes() -> None:
    found = refusals(TRACES["alike"](SAMPLES[0]), 1_500.0)
    errors = found["error_s"]["1_slots"]
    assert found["several_classes_percent"] == 0.0
    assert errors["forecasts"] > 20
    assert errors["steady"] == errors["behavior"]


@pytest.mark.parametrize("name", TRACES)
def test_a_session_of_a_trace_tells_only_what_is_over(name: str) -> None:
    visit = TRACES[name](SAMPLES[0])[5]
    middle = visit.times(visit.begins_s + visit.stay_s / 2)
    end, later = visit.times(visit.ends_s), visit.times(visit.ends_s + 60.0)
    assert middle.holds_slot
    assert middle.left_at is None
    assert end == later
    assert end.ended
    assert middle.changes <= end.changes
    assert middle.chunks <= end.chunks <= visit.stay_s


def test_the_mix_of_declared_tenants_changes() -> None:
    visits = TRACES["tenants"](0)
    long = KINDS[-1].tenant
    shares = [
        sum(one.tenant == long for one in part) / len(part)
        for part in (
            [one for one in visits if from_s <= one.begins_s < from_s + 900.0] for from_s in (0.0, 900.0)
        )
    ]
    assert shares[0] < 0.2 < 0.4 < shares[1]


@given(st.lists(st.floats(0, 5), min_size=30, max_size=30), st.floats(0, 100), st.floats(0.01, 200))
def test_the_time_of_a_departure_is_when_so_many_are_expected(
    rises: list[float], elapsed_s: float, count: float
) -> None:
    curve = [0.0]
    for rise in rises:
        curve.append(curve[-1] + rise)
    departures = ExpectedTimes(ExpectedDepartures(tuple(curve)), elapsed_s)
    at_s = departures.time_of(count)
    if at_s is None:
        assert departures.by(1e6) < count
    elif at_s < 1e7:
        assert departures.by(at_s) == pytest.approx(count, rel=1e-6, abs=1e-6)
        assert departures.by(at_s / 2) <= count * (1 + 1e-9)


def compared(by_behavior: float) -> ForecastErrors:
    """Return the errors of forecasts of 5 departures and of `by_behavior`, where three sessions have left."""
    errors = ForecastErrors()
    for minute in range(LEAST_COMPARED):
        errors.add(60.0 * minute, 5.0, by_behavior)
    errors.compare([20.0 * third + 1 for third in range(3 * LEAST_COMPARED)], 0.0, 60.0 * LEAST_COMPARED)
    return errors


def test_the_better_forecast_counts_once_it_was_better_often_enough() -> None:
    learner = BehaviorLearner()
    learner.expected = ExpectedDepartures(tuple(float(step) for step in range(31)))
    # It has not been compared.
    assert expected_times(learner, 0.0) is None
    for by_behavior, wins in ((4.0, True), (5.0, False), (16.0, False)):
        learner.errors = compared(by_behavior)
        assert favor_behavior(learner.errors) is wins
        assert (expected_times(learner, 0.0) is not None) is wins
    learner.errors, learner.expected = compared(4.0), None
    assert expected_times(learner, 0.0) is None


def test_expected_departures_count_from_now_on() -> None:
    curve = ExpectedDepartures(tuple(float(step * step) for step in range(31)))
    before, later = ExpectedTimes(curve), ExpectedTimes(curve, 14.0)
    assert later.by(0.0) == 0.0
    assert later.by(STEP_S) == pytest.approx(before.by(14.0 + STEP_S) - before.by(14.0))

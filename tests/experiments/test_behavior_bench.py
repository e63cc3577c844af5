"""Forecasts by behavior over the real arrivals."""

from __future__ import annotations

import pytest

from turboserve.experiments.autoscale.behavior import KINDS, SAMPLES, TRACES, refusals


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

"""Comparison of demand forecasts."""

from __future__ import annotations

import numpy as np
import pytest

from turboserve.autoscaler.control.workload import Forecast
from turboserve.experiments.autoscale.coverage import (
    HORIZON_S,
    SHARE,
    NaiveForecast,
    RidgeForecast,
    controlled,
    coverage,
    equal_share,
)
from turboserve.experiments.autoscale.forecasts import LAGS, errors_of
from turboserve.experiments.autoscale.plant import Plant
from turboserve.experiments.autoscale.shapes import from_counts, square

WAVES = [square(10, 30, 60, 240), square(5, 20, 90, 240)]


def test_a_straight_ramp_is_learned_and_the_product_sees_it_coming() -> None:
    ramps = [from_counts("ramp", [10 + by * second for second in range(90)], 0) for by in (1, 2)]
    found = errors_of(ramps[:1], ramps[1:], 5)
    assert found["none"]["rms"] == pytest.approx(10.0)
    assert found["product"]["rms"] < 9.0
    assert found["learned"]["rms"] < 1.0


def test_a_learned_forecast_expects_what_its_weights_say() -> None:
    weights = np.zeros(len(LAGS))
    weights[LAGS.index(5)] = 2.0
    forecast = RidgeForecast(HORIZON_S, 0.5, weights)
    for second in range(31):
        forecast.observe(3 * second, float(second))
    # 90 is the value of the current step; five steps before it were 75.
    assert forecast.plain == pytest.approx(90 + 2 * 15)
    still = NaiveForecast(HORIZON_S, 0.5)
    still.observe(7, 0.0)
    still.observe(4, 1.0)
    assert still.plain == 7


@pytest.mark.parametrize("kind", [NaiveForecast, Forecast])
def test_the_margin_is_the_least_that_covers_the_share(kind: type[Forecast]) -> None:
    def make(quantile: float) -> Forecast:
        return kind(HORIZON_S, quantile)

    quantile = equal_share(make, WAVES)
    at, below = coverage(make, quantile, WAVES), coverage(make, quantile - 0.05, WAVES)
    assert at.share >= SHARE >= below.share
    assert at.surplus > below.surplus
    assert at.shortfall <= below.shortfall


def test_a_controller_with_a_forecast_is_earlier_and_dearer_than_one_without() -> None:
    wave = square(10, 30, 60, 240)
    without, ahead = (
        controlled(wave, Plant(), None),
        controlled(wave, Plant(), NaiveForecast(HORIZON_S, 0.99)),
    )
    assert ahead.cost_s > without.cost_s
    assert ahead.late <= without.late

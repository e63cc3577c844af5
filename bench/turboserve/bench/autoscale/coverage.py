"""Forecasts at equal coverage: what each expects too much, and what the controller makes of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turboserve.autoscaler.control.budget import budget
from turboserve.autoscaler.control.forecast import Forecast
from turboserve.bench.autoscale.forecasts import LAGS, Floats, kinds, learned
from turboserve.bench.autoscale.outcome import ScalingOutcome
from turboserve.bench.autoscale.plant import Plant, policy_for
from turboserve.bench.autoscale.simulation import Simulation
from turboserve.bench.autoscale.sizers import Controlled, flat_table
from turboserve.bench.autoscale.trace import WorkloadTrace

SHARE = 0.95
"""Of all instants, those at which no more came than was expected."""
HORIZON_S = 10.0
TARGET = 0.8
"""ρ̂ of the controllers."""
HALVINGS = 12
MOST = {"windows": 16}
"""Workers at most, where that is not 64."""
MakeForecast = Callable[[float], Forecast]
"""A new forecast whose margin is a quantile of its errors."""


class NaiveForecast(Forecast):
    """Expects what is there now."""

    def ahead(self, demand: float) -> float:
        return demand

    def learn(self, demand: float) -> None:
        """There is nothing to learn."""


class RidgeForecast(Forecast):
    """Ridge regression on the changes since LAGS steps ago, with weights from other traces."""

    def __init__(self, horizon_s: float, quantile: float, weights: Floats) -> None:
        super().__init__(horizon_s, quantile)
        self._weights = [float(weight) for weight in weights]
        self._past: deque[float] = deque(maxlen=max(LAGS))

    def ahead(self, demand: float) -> float:
        past = self._past
        # What was before the first step is taken to have been like it.
        before = [past[-min(lag, len(past))] if past else demand for lag in LAGS]
        return demand + sum(w * (demand - then) for w, then in zip(self._weights, before, strict=True))

    def learn(self, demand: float) -> None:
        self._past.append(demand)


@dataclass(frozen=True)
class CoverageResult:
    """How a forecast fared on some traces. Sessions are means over all instants."""

    share: float
    surplus: float
    """Sessions expected that did not come."""
    shortfall: float
    """Sessions that came and were not expected."""


def coverage_case(kind: str) -> dict[str, dict[str, float]]:
    """On unseen traces of the kind, each forecast with the margin with which it covers SHARE of the instants
    there: what it expects too much, and what a controller with it costs and lets be late, start-up HORIZON_S.
    `reactive` has no forecast."""
    seen, unseen = kinds()[kind]
    weights = learned(seen, int(HORIZON_S))
    makers: dict[str, MakeForecast] = {
        "none": lambda quantile: NaiveForecast(HORIZON_S, quantile),
        "product": lambda quantile: Forecast(HORIZON_S, quantile),
        "learned": lambda quantile: RidgeForecast(HORIZON_S, quantile, weights),
    }
    plant = Plant(most=MOST.get(kind, 64), start_up_s=HORIZON_S)
    found = {"reactive": _figures([controlled(trace, plant, None) for trace in unseen])}
    for name, make in makers.items():
        quantile = equal_share(make, unseen)
        covered = coverage(make, quantile, unseen)
        runs = [controlled(trace, plant, make(quantile)) for trace in unseen]
        found[name] = {
            "quantile": round(quantile, 4),
            "coverage": round(covered.share, 4),
            "surplus_sessions": round(covered.surplus, 2),
            "shortfall_sessions": round(covered.shortfall, 3),
            **_figures(runs),
        }
    return found


def equal_share(make: MakeForecast, traces: Sequence[WorkloadTrace], share: float = SHARE) -> float:
    """The least quantile of its own errors with which a forecast covers `share` of the instants."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if coverage(make, middle, traces).share >= share else (middle, high)
    return high


def coverage(make: MakeForecast, quantile: float, traces: Sequence[WorkloadTrace]) -> CoverageResult:
    """Told the number of active sessions every second; judged where HORIZON_S later is still in the trace."""
    horizon, instants, hits, surplus, shortfall = int(HORIZON_S), 0, 0, 0.0, 0.0
    for trace in traces:
        counts = trace.active()
        forecast = make(quantile)
        for now, count in enumerate(counts[:-horizon]):
            forecast.observe(count, float(now))
            expected = forecast.value
            if now < max(LAGS) or expected is None:
                continue
            missing = counts[now + horizon] - expected
            instants, hits = instants + 1, hits + (missing <= 1e-9)
            surplus, shortfall = surplus + max(-missing, 0.0), shortfall + max(missing, 0.0)
    return CoverageResult(hits / instants, surplus / instants, shortfall / instants)


def controlled(trace: WorkloadTrace, plant: Plant, forecast: Forecast | None) -> ScalingOutcome:
    """The product's controller at ρ̂ = TARGET over a trace, with this forecast as a lower bound, or none."""
    table = flat_table(TARGET, predictive=forecast is not None)
    size = budget(trace.active()[0], plant.capacity, table.levels[0], most=plant.most)
    sizer = Controlled(policy_for(plant), table, min(max(size, 1), plant.most))
    if forecast is not None:
        sizer.controller.advisor.forecast = forecast
    return Simulation(trace, plant, sizer).run()


def _figures(runs: Sequence[ScalingOutcome]) -> dict[str, float]:
    return {
        "cost_worker_s": round(math.fsum(run.cost_s for run in runs), 1),
        "late_chunks": sum(run.late for run in runs),
        "activations": sum(run.placed for run in runs),
    }

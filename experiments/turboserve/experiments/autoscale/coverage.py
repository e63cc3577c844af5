"""Forecasts at equal coverage: how much each overestimates, and how the controller performs with it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turboserve.autoscaler.control.budget import budget
from turboserve.autoscaler.control.workload import Forecast
from turboserve.experiments.autoscale.forecasts import LAGS, Floats, kinds, learned
from turboserve.experiments.autoscale.outcome import ScalingOutcome
from turboserve.experiments.autoscale.plant import Plant, policy_for
from turboserve.experiments.autoscale.simulation import Simulation
from turboserve.experiments.autoscale.sizers import Controlled, flat_table
from turboserve.experiments.autoscale.trace import WorkloadTrace

SHARE = 0.95
"""Share of the instants at which no more sessions come than the forecast expected."""
HORIZON_S = 10.0
TARGET = 0.8
"""ρ̂ of the controllers."""
HALVINGS = 12
MOST = {"windows": 16}
"""Maximum number of workers for kinds where it is not 64."""
MakeForecast = Callable[[float], Forecast]
"""Returns a new forecast whose margin is the given quantile of its errors."""


class NaiveForecast(Forecast):
    """Expects the current demand."""

    def ahead(self, demand: float) -> float:
        return demand

    def learn(self, demand: float) -> None:
        """Do nothing: there is nothing to learn."""


class RidgeForecast(Forecast):
    """Ridge regression on the changes since LAGS steps ago, with weights from other traces."""

    def __init__(self, horizon_s: float, quantile: float, weights: Floats) -> None:
        super().__init__(horizon_s, quantile)
        self._weights = [float(weight) for weight in weights]
        self._past: deque[float] = deque(maxlen=max(LAGS))

    def ahead(self, demand: float) -> float:
        past = self._past
        # Before the first step, demand is assumed equal to that of the first step.
        before = [past[-min(lag, len(past))] if past else demand for lag in LAGS]
        return demand + sum(w * (demand - then) for w, then in zip(self._weights, before, strict=True))

    def learn(self, demand: float) -> None:
        self._past.append(demand)


@dataclass(frozen=True)
class CoverageResult:
    """Result of a forecast on some traces. Sessions are means over all instants."""

    share: float
    surplus: float
    """Sessions expected that did not come."""
    shortfall: float
    """Sessions that came and were not expected."""


def coverage_case(kind: str) -> dict[str, dict[str, float]]:
    """Measure each forecast on unseen traces of the kind, at equal coverage.

    The margin is set so that each forecast covers SHARE of the instants there. Reports the overestimate, and
    the cost and lateness of a controller with the forecast and a start-up of HORIZON_S. `reactive` has no
    forecast.
    """
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
    """Find the least quantile of its own errors with which a forecast covers `share` of the instants."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if coverage(make, middle, traces).share >= share else (middle, high)
    return high


def coverage(make: MakeForecast, quantile: float, traces: Sequence[WorkloadTrace]) -> CoverageResult:
    """Measure a forecast that observes the number of active sessions every second.

    Only instants whose HORIZON_S later is still in the trace count.
    """
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
    """Run the product's controller at ρ̂ = TARGET over a trace. The forecast, if any, is a lower bound."""
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

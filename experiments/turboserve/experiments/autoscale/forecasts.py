"""Errors of demand forecasts: none at all, the product's, and one learned from other traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turboserve.autoscaler.control.workload import Forecast
from turboserve.experiments.autoscale.appendix import other_windows
from turboserve.experiments.autoscale.production import azure, production
from turboserve.experiments.autoscale.trace import WorkloadTrace

NAMES = ("T1", "T2", "T3")
"""Drawn traces of Table 12."""
LAGS = (1, 2, 3, 5, 10, 20)
"""Lags, in seconds. The learned forecast uses the change of demand since each lag."""
RIDGE = 10.0
Floats = NDArray[np.float64]


def kinds() -> dict[str, tuple[list[WorkloadTrace], list[WorkloadTrace]]]:
    """Return traces by kind: those to learn from, and others to measure on."""
    return {
        "windows": ([other_windows(seed) for seed in range(10)],
                    [other_windows(seed) for seed in range(100, 108)]),
        "T1-T3": ([production(name, 1) for name in NAMES], [production(name) for name in NAMES]),
        "azure": ([azure(scale, 1800.0) for scale in (2, 8)], [azure(scale, 1800.0) for scale in (1, 16)]),
    }  # fmt: skip


def forecast_case(horizons: Sequence[int]) -> dict[str, Any]:
    """Measure the errors of the forecasts of sessions, by kind of trace and horizon.

    Forecasts learn on some draws or time scales and are measured on others. `none` expects the current
    demand.
    """
    return {
        kind: {f"{horizon}_s": errors_of(seen, unseen, horizon) for horizon in horizons}
        for kind, (seen, unseen) in kinds().items()
    }


def errors_of(
    seen: Sequence[WorkloadTrace], unseen: Sequence[WorkloadTrace], horizon: int
) -> dict[str, dict[str, float]]:
    """Return the errors on `unseen` of forecasts made `horizon` seconds before, learned on `seen`."""
    weights = learned(seen, horizon)
    inputs, changes = _examples(unseen, horizon)
    return {
        "none": _figures(changes),
        "product": _figures(np.concatenate([_product(trace, horizon) for trace in unseen])),
        "learned": _figures(changes - inputs @ weights),
    }


def _figures(errors: Floats) -> dict[str, float]:
    """Return the root mean square, and the 95th percentile, which a margin must cover."""
    root = float(np.sqrt(np.mean(errors**2)))
    return {"rms": round(root, 2), "p95": round(float(np.quantile(errors, 0.95)), 2)}


def learned(traces: Sequence[WorkloadTrace], horizon: int) -> Floats:
    """Fit a ridge regression of the change within the horizon on the changes since LAGS ago.

    Returns the weights, (lags,).
    """
    inputs, changes = _examples(traces, horizon)
    square = inputs.T @ inputs + RIDGE * np.eye(len(LAGS))
    return np.asarray(np.linalg.solve(square, inputs.T @ changes), dtype=np.float64)


def _examples(traces: Sequence[WorkloadTrace], horizon: int) -> tuple[Floats, Floats]:
    """Return the changes since LAGS ago, (n, lags), and the changes until the horizon, (n,)."""
    inputs: list[list[int]] = []
    changes: list[int] = []
    for trace in traces:
        counts = trace.active()
        for now in _instants(counts, horizon):
            inputs.append([counts[now] - counts[now - lag] for lag in LAGS])
            changes.append(counts[now + horizon] - counts[now])
    return np.array(inputs, dtype=np.float64), np.array(changes, dtype=np.float64)


def _product(trace: WorkloadTrace, horizon: int) -> Floats:
    counts = trace.active()
    forecast = Forecast(float(horizon), 0.5)
    expected: list[float] = []
    for now, count in enumerate(counts):
        forecast.observe(count, float(now))
        expected.append(forecast.plain if forecast.plain is not None else float(count))
    errors = [counts[now + horizon] - expected[now] for now in _instants(counts, horizon)]
    return np.array(errors, dtype=np.float64)


def _instants(counts: Sequence[int], horizon: int) -> range:
    return range(max(LAGS), len(counts) - horizon)

"""The metrics of TurboServe's evaluation (7.1): every experiment takes them from here.

- Cost: worker-seconds from launch to release, starting and draining workers included.
- Worst latency: of a chunk of a session on a worker (`served`, the paper's Table 9), or with the wait for a
  slot and the pause of a migration (`with_waits`).
- Latency at matched cost, cost at matched worst latency: see `Curve`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from turboserve.experiments.autoscale.outcome import ScalingOutcome
from turboserve.experiments.slack.metrics import interval


@dataclass(frozen=True)
class RunMetrics:
    """Figures of one run."""

    cost_worker_s: float
    mean_ms: float
    served_ms: float
    """Worst latency of a chunk of a session on a worker."""
    with_waits_ms: float
    """Worst latency of a chunk, with the wait for a slot and the pause of a migration."""
    activations: int
    late: int
    """Chunks above the target: first chunks of activations, and next chunks after migrations."""
    migrations: int
    actions: int

    @property
    def late_percent(self) -> float:
        """Late chunks per 100 activations."""
        return 100.0 * self.late / max(self.activations, 1)


def measure(outcome: ScalingOutcome, cost_s: float | None = None) -> RunMetrics:
    """Return the figures of a run. `cost_s`: the cost of a plan that the run only follows."""
    return RunMetrics(
        cost_worker_s=round(outcome.cost_s if cost_s is None else cost_s, 3),
        mean_ms=round(1000 * outcome.mean_s, 3),
        served_ms=round(1000 * outcome.worst_served_s, 3),
        with_waits_ms=round(1000 * outcome.worst_s, 3),
        activations=outcome.placed,
        late=outcome.late,
        migrations=outcome.migrations,
        actions=len(outcome.actions),
    )


def run_metrics(value: Mapping[str, Any]) -> RunMetrics:
    """Return the figures that `as_json` wrote."""
    return RunMetrics(**{name: value[name] for name in RunMetrics.__dataclass_fields__})


def as_json(metrics: RunMetrics) -> dict[str, Any]:
    return {**asdict(metrics), "late_percent": round(metrics.late_percent, 4)}


def above_percent(value: float, reference: float) -> float:
    """Return by how many percent `value` exceeds `reference`."""
    return 100.0 * (value / reference - 1.0)


def reduction_percent(value: float, reference: float) -> float:
    """Return by how many percent `value` is below `reference`."""
    return -above_percent(value, reference)


def ratio(ours: float, paper: float) -> float:
    """Return our number relative to the published one."""
    return round(ours / paper, 4)


def mean_interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean, its 95 % interval by Student's distribution (None for one value), and the extremes."""
    found = interval(values)
    width = found["ci95"]
    return {
        "mean": round(found["mean"] or 0.0, 4),
        "ci95": None if width is None else round(width, 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "draws": len(values),
    }


@dataclass(frozen=True)
class Setting:
    """One run of a system's sweep over pool sizes or target utilizations."""

    name: str
    cost_worker_s: float
    worst_ms: float


class Curve:
    """Cost over worst latency of one system: the runs of its sweep. No run is interpolated."""

    def __init__(self, settings: Iterable[Setting]) -> None:
        self.settings = sorted(settings, key=lambda s: (s.cost_worker_s, s.worst_ms))

    def at_cost(self, cost_worker_s: float) -> Setting | None:
        """Return the run with the least worst latency that costs no more; None if every run costs more."""
        found = [s for s in self.settings if s.cost_worker_s <= cost_worker_s * (1 + EPSILON)]
        return min(found, key=lambda s: (s.worst_ms, s.cost_worker_s), default=None)

    def at_latency(self, worst_ms: float) -> Setting | None:
        """Return the cheapest run whose worst latency is no higher; None if every run's is higher."""
        found = [s for s in self.settings if s.worst_ms <= worst_ms * (1 + EPSILON)]
        return min(found, key=lambda s: (s.cost_worker_s, s.worst_ms), default=None)


EPSILON = 1e-9


def curve(runs: Iterable[Mapping[str, Any]], latency: str) -> Curve:
    """Return the curve of a sweep's runs. `latency`: `served_ms` or `with_waits_ms`."""
    return Curve(Setting(run["setting"], run["cost_worker_s"], run[latency]) for run in runs)

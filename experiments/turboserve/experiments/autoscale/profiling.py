"""Offline profiling: from traces to a table volatility → (λ, ρ̂, forecast) (TurboServe, Appendix A)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.autoscaler.control.workload import WorkloadDetector
from turboserve.contracts.autoscale import LevelParameters, ProfileTable, Provenance
from turboserve.contracts.errors import InvalidInputError
from turboserve.experiments.autoscale.plant import Plant
from turboserve.experiments.autoscale.replay import Parameters, Replays
from turboserve.experiments.autoscale.trace import WorkloadTrace, changes

RHO_GRID = (0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
WEIGHT_GRID = (0.2, 1.0)


@dataclass(frozen=True)
class Segment:
    """A piece of a trace, and its volatility: the highest that the detector sees in it.

    The trace is played from its beginning, and the piece's share counts. The controller has memory, so a
    piece without its past would need more headroom than the live system does.
    """

    trace: WorkloadTrace
    volatility: float
    piece: int = 0
    length_s: float = math.inf
    """Length of every piece of the trace but the last."""


@dataclass(frozen=True)
class Profiled:
    """Result of the grid search for one level: the cheapest that passes, or the safest if none passes."""

    parameters: Parameters
    segments: int
    pass_rate: float
    cost_s: float
    """Mean over the segments."""
    worst_s: float
    volatility: float
    """Mean of the segments."""
    late: int = 0


def split_trace(trace: WorkloadTrace, length_s: float, policy: ControlPolicy) -> list[Segment]:
    """Cut a trace into pieces of `length_s`; a remainder shorter than half of it is left out."""
    pieces = max(math.ceil(trace.ends_s / length_s - 0.5), 1)
    bounds = [(piece * length_s, min((piece + 1) * length_s, trace.ends_s)) for piece in range(pieces)]
    return [
        Segment(trace, volatility(trace, policy, *bound), piece, length_s)
        for piece, bound in enumerate(bounds)
    ]


def whole(trace: WorkloadTrace, policy: ControlPolicy) -> Segment:
    """Return the trace as one segment."""
    return Segment(trace, volatility(trace, policy))


def volatility(
    trace: WorkloadTrace, policy: ControlPolicy, begins_s: float = 0.0, ends_s: float = math.inf
) -> float:
    """Return the highest volatility from `begins_s` until `ends_s`.

    Sessions present at t = 0 do not count as arrivals.
    """
    detector = WorkloadDetector(policy.epoch_s, policy.window)
    highest = 0.0
    for step, _ in changes(trace.steps):
        if 0 < step.at < ends_s:
            detector.add(step.kind, 1, step.at)
            if step.at >= begins_s:
                highest = max(highest, detector.volatility)
    return highest


@dataclass(frozen=True)
class Grid:
    """Parameters to try. `forecasts`: without the forecast as a lower bound, with it, or both."""

    rhos: Sequence[float] = RHO_GRID
    weights: Sequence[float] = WEIGHT_GRID
    forecasts: Sequence[bool] = (False, True)

    def __iter__(self) -> itertools.chain[Parameters]:
        """Iterate from the highest ρ̂ down: where it fails, it fails early and cheaply."""
        tried = itertools.product(sorted(self.rhos, reverse=True), sorted(self.weights), self.forecasts)
        return itertools.chain(Parameters(rho, weight, ahead) for rho, weight, ahead in tried)


def search(segments: Sequence[Segment], replays: Replays, grid: Grid | None = None) -> Profiled:
    """Find the parameters of the grid with the least mean cost and no late chunk in any segment.

    If none passes, takes the parameters with most segments without a late chunk, then with the fewest late
    chunks. The forecast is therefore on only where it beats the reactive controller: cheaper where both keep
    the target, or fewer late chunks where neither does. Ties go to the reactive one, then to the smaller λ,
    then to the smaller ρ̂.
    """
    best: Profiled | None = None
    # The most volatile segment is first, because failures are most likely there.
    ordered = sorted(segments, key=lambda segment: -segment.volatility)
    for parameters in grid or Grid():
        found = _tried(parameters, ordered, replays, best)
        if found is not None and (best is None or _key(found) < _key(best)):
            best = found
    assert best is not None, "the first of the grid is tried to its end"
    return best


def _key(found: Profiled) -> tuple[float, ...]:
    its = found.parameters
    return (-found.pass_rate, found.late, round(found.cost_s, 6), its.predictive, its.weight, its.rho)


def _tried(
    parameters: Parameters, segments: Sequence[Segment], replays: Replays, best: Profiled | None
) -> Profiled | None:
    """Try parameters. Returns None as soon as they cannot be better than a `best` that passes."""
    passes = best is not None and best.pass_rate == 1.0
    limit_s = best.cost_s * len(segments) + 1e-6 if best is not None and passes else math.inf
    cost_s, worst_s, late, passed = 0.0, 0.0, 0, 0
    for segment in segments:
        share = replays.share(segment.trace, segment.length_s, segment.piece, parameters)
        cost_s, worst_s = cost_s + share.cost_s, max(worst_s, share.worst_s)
        late, passed = late + share.late, passed + (share.late == 0)
        if passes and (late > 0 or cost_s > limit_s):
            return None
    count = len(segments)
    mean = sum(segment.volatility for segment in segments) / count
    return Profiled(parameters, count, passed / count, cost_s / count, worst_s, mean, late)


def build_table(
    segments: Sequence[Segment],
    levels: int,
    plant: Plant,
    policy: ControlPolicy,
    provenance: Provenance,
    grid: Grid | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> ProfileTable:
    """Build a table: equal intervals from the lowest to the highest volatility, with the parameters found.

    An interval without segments takes the parameters of the next higher interval that has some. Raises
    InvalidInputError if there is no segment.
    """
    if not segments:
        raise InvalidInputError("no segment to profile", field="trace", limit=1)
    if levels < 1:
        raise InvalidInputError(f"{levels} levels are too few", field="levels", limit=1)
    lowest, highest = min(s.volatility for s in segments), max(s.volatility for s in segments)
    width = (highest - lowest) / levels
    edges = [lowest + index * width for index in range(levels)] if width > 0 else [lowest]
    edges[0] = 0.0
    replays = Replays(plant, policy)
    rows: list[LevelParameters] = []
    above: Profiled | None = None
    for index in range(len(edges) - 1, -1, -1):
        upper = edges[index + 1] if index + 1 < len(edges) else None
        inside = [
            s for s in segments if s.volatility >= edges[index] and (upper is None or s.volatility < upper)
        ]
        found = search(inside, replays, grid) if inside else None
        row = found or above
        assert row is not None, "the highest interval holds the highest segment"
        rows.append(_row(index + 1, edges[index], upper, row, found))
        above = row
        progress(f"level {index + 1}: {len(inside)} segments, {row.parameters}")
    return ProfileTable(
        levels=tuple(rows[::-1]),
        provenance=provenance.model_copy(update=_conditions(plant, policy, segments)),
    )


def _conditions(plant: Plant, policy: ControlPolicy, segments: Sequence[Segment]) -> dict[str, object]:
    """Return the conditions of the table: another controller or another worker needs another table."""
    return {
        "capacity": plant.capacity,
        "latency_target_s": plant.target_s,
        "start_up_s": plant.start_up_s,
        "epoch_s": policy.epoch_s,
        "window": policy.window,
        "segments": len(segments),
        "controller": policy.dynamics,
    }


def _row(
    level: int, lower: float, upper: float | None, row: Profiled, found: Profiled | None
) -> LevelParameters:
    return LevelParameters(
        level=level,
        volatility_from=round(lower, 4),
        volatility_to=None if upper is None else round(upper, 4),
        latency_weight=row.parameters.weight,
        target_utilization=row.parameters.rho,
        predictive=row.parameters.predictive,
        segments=found.segments if found else 0,
        pass_rate=found.pass_rate if found else None,
        cost_s=round(found.cost_s, 2) if found else None,
    )

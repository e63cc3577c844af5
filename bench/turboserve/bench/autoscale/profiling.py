"""Offline profiling: from traces to a table volatility → (λ, ρ̂) (TurboServe, Appendix A)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turboserve.autoscaler.control.budget import budget
from turboserve.autoscaler.control.detector import WorkloadDetector
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.bench.autoscale.outcome import Outcome
from turboserve.bench.autoscale.plant import Plant
from turboserve.bench.autoscale.simulation import Simulation
from turboserve.bench.autoscale.sizers import Controlled, flat_table
from turboserve.bench.autoscale.trace import Trace, changes, since
from turboserve.contracts.autoscale import LevelParameters, ProfileTable, Provenance
from turboserve.contracts.errors import InvalidInputError

RHO_GRID = (0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
WEIGHT_GRID = (0.2, 1.0)


@dataclass(frozen=True)
class Segment:
    """A piece of a trace, and its volatility: the highest that the detector sees in it.

    `trace` begins `lead_in_s` before the piece: the controller remembers, so a piece cut off from what was
    before would need more headroom than the live system does.
    """

    trace: Trace
    volatility: float
    lead_in_s: float = 0.0


@dataclass(frozen=True)
class Profiled:
    """What the grid search found for one level: the cheapest that passes, or the safest if none does."""

    weight: float
    rho: float
    segments: int
    pass_rate: float
    cost_s: float
    """Mean over the segments, lead-in not counted."""
    worst_s: float
    volatility: float
    """Mean of the segments."""


def cut(trace: Trace, length_s: float, lead_in_s: float, policy: ControlPolicy) -> list[Segment]:
    """Pieces of `length_s`, one after the other; a remainder shorter than half of it is left out."""
    pieces = max(math.ceil(trace.ends_s / length_s - 0.5), 1)
    found = []
    for piece in range(pieces):
        begins_s, ends_s = piece * length_s, min((piece + 1) * length_s, trace.ends_s)
        cut_s = max(begins_s - lead_in_s, 0.0)
        part = Trace(f"{trace.name}[{piece}]", tuple(since(trace.steps, cut_s, ends_s)), ends_s - cut_s)
        found.append(Segment(part, volatility(part, policy, begins_s - cut_s), begins_s - cut_s))
    return found


def volatility(trace: Trace, policy: ControlPolicy, begins_s: float = 0.0) -> float:
    """The highest volatility from `begins_s` on. Who is there at 0 came before."""
    detector = WorkloadDetector(policy.epoch_s, policy.window)
    highest = 0.0
    for step, _ in changes(trace.steps):
        if step.at > 0:
            detector.add(step.kind, 1, step.at)
            if step.at >= begins_s:
                highest = max(highest, detector.volatility)
    return highest


def replay(segment: Segment, plant: Plant, policy: ControlPolicy, rho: float, weight: float) -> Outcome:
    """One segment through the real cores with (λ, ρ̂) fixed; cost and lateness without the lead-in."""
    table = flat_table(rho, weight)
    size = budget(segment.trace.active()[0], plant.capacity, table.levels[0], most=plant.most)
    sizer = Controlled(policy, table, min(max(size, policy.least), policy.most))
    simulation = Simulation(segment.trace, plant, sizer)
    simulation.advance(segment.lead_in_s)
    simulation.fleet.advance(segment.lead_in_s)
    before_s, late = simulation.outcome.cost_s, simulation.outcome.late
    outcome = simulation.run()
    outcome.cost_s -= before_s
    outcome.late -= late
    return outcome


def search(
    segments: Sequence[Segment],
    plant: Plant,
    policy: ControlPolicy,
    rhos: Sequence[float] = RHO_GRID,
    weights: Sequence[float] = WEIGHT_GRID,
) -> Profiled:
    """The (λ, ρ̂) of the grid with the least mean cost among those with which no chunk of any segment is late.

    If none passes: the one with most segments without a late chunk, then with the fewest late chunks. Ties go
    to the smaller λ, then to the smaller ρ̂.
    """
    found: list[tuple[tuple[float, ...], Profiled]] = []
    for weight in sorted(weights):
        for rho in sorted(rhos):
            runs = [replay(segment, plant, policy, rho, weight) for segment in segments]
            passed = sum(run.passes for run in runs) / len(runs)
            cost_s = sum(run.cost_s for run in runs) / len(runs)
            worst_s = max(run.worst_s for run in runs)
            mean = sum(segment.volatility for segment in segments) / len(segments)
            result = Profiled(weight, rho, len(segments), passed, cost_s, worst_s, mean)
            late = sum(run.late for run in runs)
            found.append(((-passed, late, round(cost_s, 6), weight, rho), result))
    return min(found, key=lambda entry: entry[0])[1]


def build_table(
    segments: Sequence[Segment],
    levels: int,
    plant: Plant,
    policy: ControlPolicy,
    provenance: Provenance,
    rhos: Sequence[float] = RHO_GRID,
    weights: Sequence[float] = WEIGHT_GRID,
    progress: Callable[[str], None] = lambda line: None,
) -> ProfileTable:
    """Equal intervals from the lowest to the highest volatility, each with the parameters found for it.

    An interval without segments takes the parameters of the next higher one that has some. Raises
    InvalidInputError if there is no segment.
    """
    if not segments:
        raise InvalidInputError("there is no segment to profile", field="trace", limit=1)
    if levels < 1:
        raise InvalidInputError(f"{levels} levels are not enough", field="levels", limit=1)
    lowest, highest = min(s.volatility for s in segments), max(s.volatility for s in segments)
    width = (highest - lowest) / levels
    edges = [lowest + index * width for index in range(levels)] if width > 0 else [lowest]
    edges[0] = 0.0
    rows: list[LevelParameters] = []
    above: Profiled | None = None
    for index in range(len(edges) - 1, -1, -1):
        upper = edges[index + 1] if index + 1 < len(edges) else None
        inside = [
            s for s in segments if s.volatility >= edges[index] and (upper is None or s.volatility < upper)
        ]
        found = search(inside, plant, policy, rhos, weights) if inside else None
        row = found or above
        assert row is not None, "the highest interval holds the highest segment"
        rows.append(_row(index + 1, edges[index], upper, row, found))
        above = row
        progress(f"level {index + 1}: {len(inside)} segments, ρ̂ {row.rho:g}, λ {row.weight:g}")
    return ProfileTable(levels=tuple(rows[::-1]), provenance=provenance)


def _row(
    level: int, lower: float, upper: float | None, row: Profiled, found: Profiled | None
) -> LevelParameters:
    return LevelParameters(
        level=level,
        volatility_from=round(lower, 4),
        volatility_to=None if upper is None else round(upper, 4),
        latency_weight=row.weight,
        target_utilization=row.rho,
        segments=found.segments if found else 0,
        pass_rate=found.pass_rate if found else None,
        cost_s=round(found.cost_s, 2) if found else None,
    )

"""The case `absorption`: bursts carried by lower quality while workers start, against fronts without it.

The controller, placement and rebalancing are the product's. Every sizer runs over the same grid, sees the
same signals and begins with the same workers. `absorbed` runs the baselines on workers that absorb, too: so
the gain of absorption and the gain of a controller that knows of it show apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turboserve.autoscaler.control.policy import default_table
from turboserve.contracts.autoscale import ProfileTable
from turboserve.experiments.autoscale.appendix import other_windows
from turboserve.experiments.autoscale.oracles import cheapest_plan, slot_needs
from turboserve.experiments.autoscale.outcome import ScalingOutcome
from turboserve.experiments.autoscale.plant import Plant, policy_for
from turboserve.experiments.autoscale.production import SCALES, azure
from turboserve.experiments.autoscale.profiling import RHO_GRID
from turboserve.experiments.autoscale.simulation import Simulation
from turboserve.experiments.autoscale.sizers import Controlled, Sizer, Utilization, flat_table
from turboserve.experiments.autoscale.trace import WorkloadTrace

SLOT_S = 60.0
LIMITS = (0.02, 0.05, 0.1)
"""Limits of quality debt."""
LIMIT = 0.05
RHO = 0.5
"""ρ̂ of `ours`: the best constant on Azure slowed 2 and 8 times and on the drawn traces 0 to 3."""
BURSTY = range(100, 104)
"""Seeds of the four bursty traces. Nothing was tuned on them."""
MEMORY_SLOTS = (6, 7, 8)
"""K_floor of workers with less memory."""
PLANT = Plant(most=64, floor_factor=0.5)
"""The floor takes half the time of the best configuration (`docs/performance.md`), so K_floor is 10."""


@dataclass(frozen=True)
class Point:
    """One run: cost in worker-seconds and late first chunks of activations."""

    cost_s: float
    late: int


class Front:
    """The lower convex hull of runs: what a mixture of them could reach."""

    def __init__(self, points: Sequence[Point]) -> None:
        best: list[Point] = []
        for point in sorted(points, key=lambda p: (p.cost_s, p.late)):
            if best and point.late >= best[-1].late:
                continue
            while len(best) > 1 and _turns(best[-2], best[-1], point) <= 0:
                best.pop()
            best.append(point)
        self.points = best

    def late_at(self, cost_s: float) -> float | None:
        """Return the late activations at this cost; None if no run costs so little."""
        if cost_s < self.points[0].cost_s:
            return None
        for one, other in zip(self.points, self.points[1:], strict=False):
            if cost_s <= other.cost_s:
                share = (cost_s - one.cost_s) / (other.cost_s - one.cost_s)
                return one.late + share * (other.late - one.late)
        return float(self.points[-1].late)

    def cost_at(self, late: float) -> float | None:
        """Return the least cost with at most so many late activations; None if every run has more."""
        if late >= self.points[0].late:
            return self.points[0].cost_s
        for one, other in zip(self.points, self.points[1:], strict=False):
            if late >= other.late:
                share = (one.late - late) / (one.late - other.late)
                return one.cost_s + share * (other.cost_s - one.cost_s)
        return None


def _turns(first: Point, second: Point, third: Point) -> float:
    """Return a number above 0 if the three points turn left, as a lower hull does."""
    run, rise = second.cost_s - first.cost_s, second.late - first.late
    return run * (third.late - first.late) - rise * (third.cost_s - first.cost_s)


class Absorbed:
    """A sizer that knows nothing of absorption, with workers that hold up to K_floor sessions."""

    absorbs = True

    def __init__(self, sizer: Sizer) -> None:
        self._sizer = sizer
        self.on_session_change = sizer.on_session_change
        self.on_feedback = sizer.on_feedback
        self.tick = sizer.tick

    @property
    def target(self) -> int:
        return self._sizer.target


def traces(lasts_s: float) -> dict[str, WorkloadTrace]:
    """Return the measured traces by name."""
    found = {f"azure x{stretch}": azure(stretch, lasts_s) for stretch in SCALES}
    return found | {f"bursty {seed}": other_windows(seed) for seed in BURSTY}


def absorption_case(trace: WorkloadTrace, progress: Callable[[str], None]) -> dict[str, Any]:
    """Compare one trace with and without absorption."""
    needs = slot_needs(trace, PLANT.capacity, 1.0, SLOT_S, PLANT.most)
    _, oracle_s = cheapest_plan(needs, SLOT_S, PLANT.start_up_s)
    runs = _Runs(trace, max(needs[0], 1))
    plain = runs.baselines(lambda sizer: sizer)
    absorbed = runs.baselines(Absorbed)
    ours = {
        f"{name}, limit {limit:g}": runs.ours(table, limit)
        for name, table in {"shipped_table": default_table(), f"constant_{RHO:g}": flat_table(RHO)}.items()
        for limit in LIMITS
    }
    front = Front([point(run) for run in plain.values()])
    chosen = ours[f"constant_{RHO:g}, limit {LIMIT:g}"]
    headline = figures(chosen, oracle_s) | against(chosen, front)
    progress(f"{trace.name}: {_brief(headline)}")
    return {
        "oracle_cost_worker_s": round(oracle_s, 1),
        "without": {"shipped_table": figures(runs.ours(default_table(), 0.0), oracle_s)},
        "front": [{"cost_worker_s": round(p.cost_s, 1), "late_activations": p.late} for p in front.points],
        "baselines": {name: figures(run, oracle_s) for name, run in plain.items()},
        "absorbed_baselines": {name: figures(run, oracle_s) for name, run in absorbed.items()},
        "ours": {name: figures(run, oracle_s) | against(run, front) for name, run in ours.items()},
        "less_memory": {
            f"k_floor {slots}": figures(run, oracle_s) | against(run, front)
            for slots in MEMORY_SLOTS
            for run in (runs.ours(flat_table(RHO), LIMIT, replace(PLANT, memory_slots=slots)),)
        },
        "headline": headline,
    }


class _Runs:
    """Runs of one trace that all begin with the same number of workers."""

    def __init__(self, trace: WorkloadTrace, begin: int) -> None:
        self._trace, self._begin = trace, begin

    def baselines(self, wrap: Callable[[Sizer], Sizer]) -> dict[str, ScalingOutcome]:
        policy, begin, most = policy_for(PLANT), self._begin, PLANT.most
        sizers: dict[str, Sizer] = {}
        for rho in RHO_GRID:
            sizers[f"constant_{rho:g}"] = Controlled(policy, flat_table(rho), begin)
            sizers[f"predictive_{rho:g}"] = Controlled(policy, flat_table(rho, predictive=True), begin)
            sizers[f"utilization_{rho:g}"] = Utilization(begin, rho, 1, most)
        return {name: Simulation(self._trace, PLANT, wrap(sizer)).run() for name, sizer in sizers.items()}

    def ours(self, table: ProfileTable, limit: float, plant: Plant = PLANT) -> ScalingOutcome:
        policy = policy_for(plant, quality_debt_limit=limit)
        return Simulation(self._trace, plant, Controlled(policy, table, self._begin)).run()


def point(run: ScalingOutcome) -> Point:
    return Point(run.cost_s, run.late_first)


def figures(run: ScalingOutcome, oracle_s: float) -> dict[str, Any]:
    """Return the figures of one run for JSON."""
    return {
        "cost_worker_s": round(run.cost_s, 1),
        "cost_of_oracle": round(run.cost_s / oracle_s, 3),
        "activations": run.placed,
        "late_activations": run.late_first,
        "late_share": round(run.late_first / max(run.placed, 1), 5),
        "late_chunks": run.late,
        "quality_debt": round(run.quality_debt, 5),
        "quality_debt_worst_minute": round(run.debt_peak, 4),
        "moves": run.migrations,
        "actions": len(run.actions),
    }


def against(run: ScalingOutcome, front: Front) -> dict[str, Any]:
    """Compare a run with the front: late activations at its cost, and cost at its late activations."""
    late, cost_s = front.late_at(run.cost_s), front.cost_at(run.late_first)
    return {
        "front_late_at_cost": None if late is None else round(late, 1),
        "front_cost_at_late": None if cost_s is None else round(cost_s, 1),
        "fewer_late_percent": round(100 * (1 - run.late_first / late), 1) if late else None,
        "cheaper_percent": round(100 * (1 - run.cost_s / cost_s), 1) if cost_s is not None else None,
        "cheaper_than_every_run": late is None,
    }


def _brief(row: Mapping[str, Any]) -> str:
    return (
        f"{row['cost_of_oracle']:.2f} of the oracle's cost, {row['late_activations']} late of "
        f"{row['activations']} (front: {row['front_late_at_cost']} at this cost), {row['cheaper_percent']} % "
        f"cheaper at equal lateness, quality debt {100 * row['quality_debt']:.2f} %"
    )

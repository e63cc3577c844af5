"""Oracles that know the whole trace: Appendix A's windowed search, and the dynamic program of 7.4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from turboserve.autoscaler.control.events import TableReplaced
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.contracts.autoscale import ProfileTable
from turboserve.experiments.autoscale.outcome import ScalingOutcome
from turboserve.experiments.autoscale.plant import Plant
from turboserve.experiments.autoscale.profiling import RHO_GRID
from turboserve.experiments.autoscale.simulation import Simulation
from turboserve.experiments.autoscale.sizers import Controlled, flat_table
from turboserve.experiments.autoscale.trace import WorkloadTrace, changes


@dataclass(frozen=True)
class WindowedOracle:
    """The cheapest ρ̂ for every window, and the outcome."""

    targets: tuple[float, ...]
    outcome: ScalingOutcome


def windowed_oracle(
    trace: WorkloadTrace,
    plant: Plant,
    policy: ControlPolicy,
    window_s: float,
    grid: Sequence[float] = RHO_GRID,
    weight: float = 0.2,
    forecasts: Sequence[bool] = (False,),
) -> WindowedOracle | None:
    """Find for every window the ρ̂ with which the same mechanism is cheapest, with no chunk late.

    Returns None if no choice keeps every chunk in time. This is Appendix A's oracle: the product's controller
    with its limits, cool-downs and start-up delay, and its ρ̂ chosen per window with the future known. The
    paper's oracle has no forecast; with `forecasts` of both kinds, this one has all the choices that
    profiling has.

    After each window the cheapest run is kept for every target and number of paid workers with which the
    window can end. A window may therefore pay for the next window's burst, as in a dynamic program. Runs that
    end alike can differ inside (the assignment of sessions, the contents of the scale-in window), so the
    result is a very good choice and not a proven optimum.
    """
    tables = [flat_table(rho, weight, predictive) for rho in grid for predictive in forecasts]
    kept: list[_Run] = []
    for table in tables:
        rho = table.levels[0].target_utilization
        size = max(math.ceil(trace.active()[0] / (plant.capacity * rho) - 1e-9), 1)
        sizer = Controlled(policy, table, min(size, plant.most))
        kept.append(_Run((rho,), Simulation(trace, plant, sizer)))
    windows = math.ceil(trace.ends_s / window_s)
    for window in range(1, windows + 1):
        ends_s = min(window * window_s, trace.ends_s)
        for run in kept:
            run.simulation.advance(ends_s)
        kept = _best(kept, ends_s)
        if window < windows:
            kept = [run.turn(table, ends_s) for run in kept for table in tables]
    for run in kept:
        run.simulation.fleet.finish(trace.ends_s)
    sound = [run for run in kept if run.simulation.outcome.passes]
    if not sound:
        return None
    best = min(sound, key=lambda run: run.simulation.outcome.cost_s)
    return WindowedOracle(best.targets, best.simulation.outcome)


@dataclass(frozen=True)
class _Run:
    targets: tuple[float, ...]
    simulation: Simulation

    def turn(self, table: ProfileTable, now: float) -> _Run:
        simulation = self.simulation.fork()
        assert isinstance(simulation.sizer, Controlled)
        simulation.sizer.controller.handle(TableReplaced(table), now)
        return _Run((*self.targets, table.levels[0].target_utilization), simulation)


def _best(runs: Sequence[_Run], now: float) -> list[_Run]:
    """Return the cheapest run without late chunks for every way in which a window can end."""
    best: dict[tuple[int, int, int], _Run] = {}
    for run in runs:
        simulation = run.simulation
        fleet = simulation.fleet
        fleet.advance(now)
        if not simulation.outcome.passes or fleet.overdue(now):
            continue
        key = (fleet.target, fleet.paid, fleet.starting)
        known = best.get(key)
        if known is None or simulation.outcome.cost_s < known.simulation.outcome.cost_s:
            best[key] = run
    return list(best.values())


def slot_needs(trace: WorkloadTrace, capacity: int, rho: float, slot_s: float, most: int) -> list[int]:
    """Return the workers that keep the utilization at or below ρ̂ at every instant of each slot."""
    peaks = [0] * math.ceil(trace.ends_s / slot_s)
    count, last = 0, 0
    for step, by in changes(trace.steps):
        slot = min(int(step.at / slot_s), len(peaks) - 1)
        # Sessions active at a slot's beginning are active in the slot.
        for passed in range(last + 1, slot + 1):
            peaks[passed] = count
        last = max(last, slot)
        count += by
        peaks[slot] = max(peaks[slot], count)
    for passed in range(last + 1, len(peaks)):
        peaks[passed] = count
    return [min(max(math.ceil(peak / (capacity * rho) - 1e-9), 1), most) for peak in peaks]


def cheapest_plan(needs: Sequence[int], slot_s: float, start_up_s: float) -> tuple[list[int], float]:
    """Return the cheapest sizes by slot, none below its need, and their cost: the oracle of 7.4.

    A dynamic program over budgets; the cost is in worker-seconds. A worker costs from its launch on,
    `start_up_s` before the slot in which it serves. The workers of the first slot are present from the start.
    Only budgets that some slot needs can be best.
    """
    budgets = sorted(set(needs))
    costs = {size: size * slot_s if size >= needs[0] else math.inf for size in budgets}
    came: list[dict[int, int]] = []
    for need in needs[1:]:
        step: dict[int, float] = {}
        origin: dict[int, int] = {}
        for size in budgets:
            before = min(budgets, key=lambda b: (costs[b] + start_up_s * max(size - b, 0), b))
            start_s = start_up_s * max(size - before, 0)
            step[size] = costs[before] + start_s + size * slot_s if size >= need else math.inf
            origin[size] = before
        costs = step
        came.append(origin)
    size = min(budgets, key=lambda b: (costs[b], b))
    cost_s = costs[size]
    plan = [size]
    for origin in reversed(came):
        plan.append(origin[plan[-1]])
    return plan[::-1], cost_s

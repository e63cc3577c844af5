"""Oracles that know the whole trace: Appendix A's windowed search, and the dynamic program of 7.4."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from turboserve.autoscaler.control.events import SessionChange, TableReplaced
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.contracts.autoscale import ProfileTable
from turboserve.experiments.autoscale.outcome import ScalingOutcome
from turboserve.experiments.autoscale.plant import Plant
from turboserve.experiments.autoscale.profiling import RHO_GRID
from turboserve.experiments.autoscale.simulation import Simulation
from turboserve.experiments.autoscale.sizers import Controlled, flat_table
from turboserve.experiments.autoscale.trace import Step, WorkloadTrace, changes


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


def cheapest_cost(needs: Iterable[tuple[float, int]], ends_s: float, start_up_s: float) -> float:
    """Return the least worker-seconds of a pool that is never below its needs.

    As `cheapest_plan`, with changes at any instant. `needs`: (time, workers needed from then on), in order of
    time. The k-th worker is needed while the need
    is k or more. Between two such times it either stays or is released and started again, so each gap costs
    the smaller of its length and the start-up. Workers are alike, so the k-th workers are independent.
    """
    cost_s, before, since = 0.0, 0, 0.0
    free_since: list[float] = []
    """By worker that has been needed: the time at which it was needed last."""
    for at, need in needs:
        cost_s += before * (at - since)
        for worker in range(before, need):
            if worker < len(free_since):
                cost_s += min(at - free_since[worker], start_up_s)
            else:
                # Workers of the first need are there from the start, and so may be those of a later one.
                free_since.append(0.0)
                cost_s += min(at, start_up_s)
        for worker in range(need, before):
            free_since[worker] = at
        before, since = need, at
    return cost_s + before * (ends_s - since)


def lower_bound(trace: WorkloadTrace, plant: Plant) -> float:
    """Return worker-seconds that no policy can undercut if no first chunk is late.

    A session may wait as long as its first chunk, made alone, is still in time. Beyond that wait it holds a
    slot for as long as it is active. Whether migrations are free, and what they cost, does not matter.
    """
    wait_s = plant.target_s - plant.latency_s[1]
    since: dict[str, float] = {}
    held: list[tuple[float, int]] = []
    for step in (*trace.steps, *(Step(trace.ends_s, s, SessionChange.DEPARTURE) for s in trace.sessions)):
        if step.kind in (SessionChange.ARRIVAL, SessionChange.ACTIVATION):
            since[step.session] = step.at
        else:
            begins_s = since.pop(step.session, math.inf) + wait_s
            if begins_s < step.at:
                held += [(begins_s, 1), (step.at, -1)]
    needs: list[tuple[float, int]] = []
    count = 0
    for at, group in itertools.groupby(sorted(held), key=lambda change: change[0]):
        count += sum(by for _, by in group)
        needs.append((at, min(math.ceil(count / plant.capacity), plant.most)))
    return cheapest_cost(needs, trace.ends_s, plant.start_up_s)

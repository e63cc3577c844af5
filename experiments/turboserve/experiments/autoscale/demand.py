"""The cases of `turboserve bench autoscale` with production demand: T1–T3, and real arrivals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from turboserve.autoscaler.control.policy import default_table
from turboserve.contracts.autoscale import ProfileTable, Provenance
from turboserve.experiments.autoscale.oracles import cheapest_plan, slot_needs
from turboserve.experiments.autoscale.plant import Plant, policy_for
from turboserve.experiments.autoscale.production import azure, production
from turboserve.experiments.autoscale.profiling import Grid, build_table, split_trace
from turboserve.experiments.autoscale.simulation import Simulation
from turboserve.experiments.autoscale.sizers import Controlled, Fixed, Planned, Sizer, Utilization, flat_table
from turboserve.experiments.autoscale.trace import WorkloadTrace

Progress = Callable[[str], None]
SLOT_S = 60.0
TARGET = 0.8
"""ρ̂ of the oracle of section 7.4, and of the controller that is compared with it."""
SEGMENT_S = 60.0
LEVELS = 4
SEEN_SEED = 1
"""Seed of the drawn traces that are profiled; the measured traces have seed 0."""
SEEN_SCALES = (2, 8)
"""Time scales of the real arrivals that are profiled; 1, 4 and 16 are measured."""


def profiled(traces: Sequence[WorkloadTrace], plant: Plant, grid: Grid) -> ProfileTable:
    """Build a table from other traces of the kind."""
    policy = policy_for(plant)
    pieces = [piece for trace in traces for piece in split_trace(trace, SEGMENT_S, policy)]
    source = Provenance(source=", ".join(trace.name for trace in traces))
    return build_table(pieces, LEVELS, plant, policy, source, grid)


def production_case(names: Sequence[str], start_up_s: float, progress: Progress) -> dict[str, Any]:
    """Compare drawn traces of Table 12 with the dynamic program of 7.4, both at ρ̂ = 0.8.

    Both begin with the same workers. `profiled` uses the forecast at the levels of volatility at which it
    paid on other draws of these traces.
    """
    plant = Plant(most=64, start_up_s=start_up_s)
    seen = [production(name, SEEN_SEED) for name in names]
    tables = {
        "reactive": flat_table(TARGET),
        "predictive": flat_table(TARGET, predictive=True),
        "profiled": profiled(seen, plant, Grid((TARGET,), (0.2,))),
    }
    found: dict[str, Any] = {}
    for name in names:
        trace = production(name)
        needs = slot_needs(trace, plant.capacity, TARGET, SLOT_S, plant.most)
        plan, oracle_s = cheapest_plan(needs, SLOT_S, start_up_s)
        replayed = Simulation(trace, plant, Planned(plan, SLOT_S, start_up_s)).run()
        rows: dict[str, Any] = {"oracle": {**replayed.figures(), "cost_worker_s": oracle_s}}
        for mode, table in tables.items():
            begins = Controlled(policy_for(plant), table, plan[0])
            run = Simulation(trace, plant, begins).run()
            gap = round(100 * (run.cost_s / oracle_s - 1), 2)
            rows[mode] = {**run.figures(), "gap_percent": gap}
            progress(
                f"{name}, start-up {start_up_s:g} s, {mode}: {gap:+.1f} %, {run.late} late of {run.placed}"
            )
        found[name] = rows
    return {
        "traces": found,
        "forecast_from_volatility": next(
            (row.volatility_from for row in tables["profiled"].levels if row.predictive), None
        ),
        "oracle_gap_percent": {mode: _gaps(found, mode) for mode in tables} | _gaps(found, "profiled"),
    }


def _gaps(found: dict[str, Any], mode: str) -> dict[str, float]:
    """Return the mean and maximum absolute gap. A cost below the oracle's also counts as a gap."""
    gaps = [abs(rows[mode]["gap_percent"]) for rows in found.values()]
    return {"mean": round(sum(gaps) / len(gaps), 2), "max": max(gaps)}


def real_case(scales: Sequence[int], lasts_s: float, progress: Progress) -> dict[str, Any]:
    """Compare Azure arrivals with fixed pools, a utilization autoscaler and the oracle."""
    plant = Plant(most=64)
    policy = policy_for(plant)
    seen = [azure(scale, lasts_s / 2) for scale in SEEN_SCALES]
    own = profiled(seen, plant, Grid((0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9), (0.2,)))
    tables = {
        "shipped_table": default_table(),
        "own_table": own,
        "reactive_0.8": flat_table(0.8),
        "predictive_0.8": flat_table(0.8, predictive=True),
    }
    found: dict[str, Any] = {}
    for stretch in scales:
        trace = azure(stretch, lasts_s)
        needs = slot_needs(trace, plant.capacity, 1.0, SLOT_S, plant.most)
        plan, oracle_s = cheapest_plan(needs, SLOT_S, plant.start_up_s)
        begin = max(needs[0], 1)
        mean = math.ceil(sum(trace.active()) / len(trace.active()) / plant.capacity / 0.8)
        sizers: dict[str, Sizer] = {
            **{name: Controlled(policy, table, begin) for name, table in tables.items()},
            "fixed_for_peak": Fixed(max(needs)),
            "fixed_for_mean": Fixed(mean),
            "utilization_0.7": Utilization(begin, 0.7, 1, plant.most),
            "utilization_0.5": Utilization(begin, 0.5, 1, plant.most),
            "oracle": Planned(plan, SLOT_S, plant.start_up_s),
        }
        rows = {name: Simulation(trace, plant, sizer).run().figures() for name, sizer in sizers.items()}
        rows["oracle"]["cost_worker_s"] = oracle_s
        for row in rows.values():
            row["cost_of_oracle"] = round(row["cost_worker_s"] / oracle_s, 3)
            row["late_share"] = round(row["late_chunks"] / max(row["activations"], 1), 5)
        found[f"x{stretch}"] = rows
        ours = rows["shipped_table"]
        progress(
            f"azure x{stretch}: {ours['cost_of_oracle']:.2f} of the oracle's cost, {ours['late_chunks']} late"
        )
    return found

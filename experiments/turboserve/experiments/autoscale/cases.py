"""The cases of `turboserve bench autoscale` from TurboServe's Appendix A, and oscillation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.contracts.autoscale import ProfileTable, Provenance
from turboserve.experiments.autoscale.appendix import (
    BURSTS,
    WINDOW_S,
    other_windows,
    segment,
    ten_windows,
)
from turboserve.experiments.autoscale.keeping import as_a_whole, keep_target, replay
from turboserve.experiments.autoscale.oracles import WindowedOracle, windowed_oracle
from turboserve.experiments.autoscale.outcome import ScalingOutcome
from turboserve.experiments.autoscale.plant import Plant, policy_for
from turboserve.experiments.autoscale.profiling import RHO_GRID, Grid, build_table, search, split_trace, whole
from turboserve.experiments.autoscale.replay import Replays
from turboserve.experiments.autoscale.sizers import flat_table
from turboserve.experiments.autoscale.trace import WorkloadTrace

Progress = Callable[[str], None]
PAPER_WEIGHT = (0.2,)
"""λ. The paper: "in this experiment, λ is fixed at 0.2"."""
UNSEEN = range(100, 104)
"""Seeds of the additional unseen traces. The profiled traces have the seeds from 0 on."""
LEVELS = 5
"""Number of levels in the table for the ten windows."""


def profiling_case(segments: int, progress: Progress) -> dict[str, Any]:
    """Reproduce Tables 5 and 6: ten levels, each with segments of one burst size."""
    plant = Plant()
    levels = []
    for level, burst in enumerate(BURSTS, 1):
        levels.append(profile_level(level, burst, segments, plant))
        row = levels[-1]
        progress(f"profiling: level {level}: ρ̂ {row['target_utilization']}, {row['cost_worker_s']} worker-s")
    rhos = [row["target_utilization"] for row in levels]
    costs = [row["cost_worker_s"] for row in levels]
    return {
        "levels": levels,
        "pass_rate": min(row["pass_rate"] for row in levels),
        "rho_never_rises": all(b <= a for a, b in pairwise(rhos)),
        "cost_never_falls": all(b >= a for a, b in pairwise(costs)),
        "start_up_s": plant.start_up_s,
    }


def profile_level(level: int, burst: int, segments: int, plant: Plant, first_seed: int = 0) -> dict[str, Any]:
    """Search the grid for one level of Table 5: segments with bursts of `burst` sessions."""
    policy = policy_for(plant)
    traces = [segment(burst, seed) for seed in range(first_seed, first_seed + segments)]
    pieces = [whole(trace, policy) for trace in traces]
    found = search(pieces, Replays(plant, policy), Grid(weights=PAPER_WEIGHT))
    return {
        "level": level,
        "volatility": round(found.volatility, 3),
        "arrivals": burst,
        "peak_active": traces[0].peak,
        "latency_weight": found.parameters.weight,
        "target_utilization": found.parameters.rho,
        "predictive": found.parameters.predictive,
        "pass_rate": found.pass_rate,
        "cost_worker_s": round(found.cost_s, 2),
        "worst_chunk_ms": round(1000 * found.worst_s, 2),
    }


def windows_case(start_up_s: float, training: int, progress: Progress) -> dict[str, Any]:
    """Reproduce Tables 7 to 10: the ten unseen windows, with a table profiled on others, against the oracle.

    As in Appendix A, the oracle has "the same migration and autoscaling mechanisms, the same maximum GPU
    budget, and the same scale-out delay and cost model", so both pay for workers that start. The paper does
    not give the start-up time; its costs match about 2 s.
    """
    plant = Plant(start_up_s=start_up_s)
    policy = policy_for(plant)
    table, seen = windows_table(plant, training)
    kept = keep_target(table, seen, plant, policy)
    trace = ten_windows()
    ours = replay(trace, plant, policy, table)
    progress(f"ten windows, start-up {start_up_s:g} s: {ours.cost_s:.0f} worker-s, {ours.late} late")
    oracle = windowed_oracle(trace, plant, policy, WINDOW_S)
    progress(
        f"ten windows, start-up {start_up_s:g} s: oracle {oracle.outcome.cost_s if oracle else math.nan:.0f}"
    )
    forecasting = windowed_oracle(trace, plant, policy, WINDOW_S, forecasts=(False, True))
    keeping = replay(trace, plant, policy, kept)
    return {
        "start_up_s": start_up_s,
        "table": _rows(table),
        "profiled_traces": _late(table),
        "ours": {**ours.figures(), "by_window": _by_window(ours)},
        "oracle": oracle
        and {**oracle.outcome.figures(), "by_window": _by_window(oracle.outcome),
             "targets": list(oracle.targets)},
        "gap_percent": _gap(ours, oracle),
        "gap_percent_forecasting_oracle": _gap(ours, forecasting),
        "chunks_above_target": ours.late,
        "keeping": {**keeping.figures(), "gap_percent": _gap(keeping, oracle), "table": _rows(kept),
                    "profiled_traces": _late(kept)},
        **unseen_traces({"ours": table, "keeping": kept}, plant, policy, progress),
    }  # fmt: skip


def windows_table(plant: Plant, training: int) -> tuple[ProfileTable, list[WorkloadTrace]]:
    """Return a table for ten windows, and the drawn traces that it is profiled on."""
    policy = policy_for(plant)
    seen = [other_windows(seed) for seed in range(training)]
    pieces = [piece for trace in seen for piece in split_trace(trace, WINDOW_S, policy)]
    provenance = Provenance(source=f"{training} drawn traces of ten windows")
    table = build_table(pieces, LEVELS, plant, policy, provenance, Grid(weights=PAPER_WEIGHT))
    return as_a_whole(table, seen, plant, policy), seen


def _rows(table: ProfileTable) -> list[dict[str, Any]]:
    names = {"volatility_from", "target_utilization", "predictive", "segments", "pass_rate"}
    return [row.model_dump(include=names) for row in table.levels]


def _late(table: ProfileTable) -> dict[str, Any]:
    """Return the late chunks of a replay of the profiled traces with the whole table."""
    return {"late_chunks": table.provenance.late, "activations": table.provenance.activations}


def unseen_traces(
    tables: Mapping[str, ProfileTable], plant: Plant, policy: ControlPolicy, progress: Progress
) -> dict[str, Any]:
    """Replay more traces of the kind that no table was profiled on.

    `more_unseen` compares each trace with its own oracle. `unseen_in_all` compares the sums with every
    constant ρ̂.
    """
    tables = {**tables, **{f"constant_{rho:g}": flat_table(rho) for rho in RHO_GRID}}
    in_all = {name: {"late_chunks": 0, "cost_worker_s": 0.0} for name in tables}
    each = []
    for seed in UNSEEN:
        trace = other_windows(seed)
        runs = {name: replay(trace, plant, policy, table) for name, table in tables.items()}
        for name, run in runs.items():
            in_all[name]["late_chunks"] += run.late
            in_all[name]["cost_worker_s"] = round(in_all[name]["cost_worker_s"] + run.cost_s, 2)
        oracle = windowed_oracle(trace, plant, policy, WINDOW_S)
        each.append(
            {
                "late_chunks": runs["ours"].late,
                "activations": runs["ours"].placed,
                "cost_worker_s": round(runs["ours"].cost_s, 2),
                "gap_percent": _gap(runs["ours"], oracle),
                "oracle_late_chunks": None if oracle is None else oracle.outcome.late,
                "keeping_late_chunks": runs["keeping"].late,
                "keeping_gap_percent": _gap(runs["keeping"], oracle),
            }
        )
        progress(f"start-up {plant.start_up_s:g} s, unseen {seed}: {runs['ours'].late} late")
    return {"more_unseen": each, "unseen_in_all": in_all}


def _gap(ours: ScalingOutcome, oracle: WindowedOracle | None) -> float | None:
    """Return by how many percent our cost exceeds the oracle's."""
    return None if oracle is None else round(100 * (ours.cost_s / oracle.outcome.cost_s - 1), 2)


def _by_window(run: ScalingOutcome) -> list[int]:
    """Return the cost of each of the ten windows, in worker-seconds."""
    return [round(run.cost_between(WINDOW_S * window, WINDOW_S * (window + 1))) for window in range(10)]

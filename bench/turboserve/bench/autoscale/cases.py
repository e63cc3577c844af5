"""The cases of `turboserve bench autoscale` that are TurboServe's Appendix A, and oscillation."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from turboserve.autoscaler.control.budget import budget
from turboserve.autoscaler.control.default import default_table
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.bench.autoscale.appendix import (
    BURSTS,
    WINDOW_S,
    other_windows,
    segment,
    ten_windows,
)
from turboserve.bench.autoscale.oracles import WindowedOracle, windowed_oracle
from turboserve.bench.autoscale.outcome import Outcome
from turboserve.bench.autoscale.plant import Plant, policy_for
from turboserve.bench.autoscale.profiling import Grid, build_table, cut, search, whole
from turboserve.bench.autoscale.replay import Replays
from turboserve.bench.autoscale.shapes import constant, square
from turboserve.bench.autoscale.simulation import Simulation
from turboserve.bench.autoscale.sizers import Controlled
from turboserve.bench.autoscale.trace import Trace
from turboserve.contracts.autoscale import ProfileTable, Provenance

Say = Callable[[str], None]
PAPER_WEIGHT = (0.2,)
"""λ: "in this experiment, λ is fixed at 0.2"."""
LEVELS = 5
"""Of the ten windows' table."""


def play(trace: Trace, plant: Plant, policy: ControlPolicy, table: ProfileTable) -> Outcome:
    """The controller over a trace; the pool begins as the table wants it for who is there at 0."""
    size = budget(trace.active()[0], plant.capacity, table.levels[0], most=plant.most)
    return Simulation(trace, plant, Controlled(policy, table, min(max(size, 1), plant.most))).run()


def profiling_case(segments: int, say: Say) -> dict[str, Any]:
    """Tables 5 and 6: ten levels, each with segments of one burst size."""
    plant = Plant()
    policy = policy_for(plant)
    replays = Replays(plant, policy)
    levels = []
    for level, burst in enumerate(BURSTS, 1):
        traces = [segment(burst, seed) for seed in range(segments)]
        found = search([whole(trace, policy) for trace in traces], replays, Grid(weights=PAPER_WEIGHT))
        say(f"profiling: level {level}: {found.parameters}, {found.cost_s:.0f} worker-s")
        levels.append(
            {
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
        )
    rhos = [row["target_utilization"] for row in levels]
    costs = [row["cost_worker_s"] for row in levels]
    return {
        "levels": levels,
        "pass_rate": min(row["pass_rate"] for row in levels),
        "rho_never_rises": all(b <= a for a, b in pairwise(rhos)),
        "cost_never_falls": all(b >= a for a, b in pairwise(costs)),
        "start_up_s": plant.start_up_s,
    }


def windows_case(start_up_s: float, training: int, say: Say) -> dict[str, Any]:
    """Tables 7 to 10: the unseen ten windows, with a table profiled on other ones, against the oracle.

    As in Appendix A the oracle has "the same migration and autoscaling mechanisms, the same maximum GPU
    budget, and the same scale-out delay and cost model", so both pay for workers that start. How long that
    takes the paper does not say; its costs are those of about 2 s.
    """
    plant = Plant(start_up_s=start_up_s)
    policy = policy_for(plant)
    pieces = [piece for seed in range(training) for piece in cut(other_windows(seed), WINDOW_S, policy)]
    provenance = Provenance(source=f"{training} drawn traces of ten windows")
    table = build_table(pieces, LEVELS, plant, policy, provenance, Grid(weights=PAPER_WEIGHT))
    trace = ten_windows()
    ours = play(trace, plant, policy, table)
    say(f"ten windows, start-up {start_up_s:g} s: {ours.cost_s:.0f} worker-s, {ours.late} late")
    oracle = windowed_oracle(trace, plant, policy, WINDOW_S)
    say(f"ten windows, start-up {start_up_s:g} s: oracle {oracle.outcome.cost_s if oracle else math.nan:.0f}")
    forecasting = windowed_oracle(trace, plant, policy, WINDOW_S, forecasts=(False, True))
    return {
        "start_up_s": start_up_s,
        "table": [
            {"volatility_from": row.volatility_from, "target_utilization": row.target_utilization,
             "predictive": row.predictive, "segments": row.segments, "pass_rate": row.pass_rate}
            for row in table.levels
        ],
        "ours": {**ours.figures(), "by_window": _by_window(ours)},
        "oracle": oracle
        and {**oracle.outcome.figures(), "by_window": _by_window(oracle.outcome),
             "targets": list(oracle.targets)},
        "gap_percent": _gap(ours, oracle),
        "gap_percent_forecasting_oracle": _gap(ours, forecasting),
        "chunks_above_target": ours.late,
        "more_unseen": [_unseen(seed, plant, policy, table) for seed in range(100, 104)],
    }  # fmt: skip


def _unseen(seed: int, plant: Plant, policy: ControlPolicy, table: ProfileTable) -> dict[str, Any]:
    """One more trace of the kind that the table has not seen."""
    trace = other_windows(seed)
    ours = play(trace, plant, policy, table)
    oracle = windowed_oracle(trace, plant, policy, WINDOW_S)
    return {
        "late_chunks": ours.late,
        "activations": ours.placed,
        "cost_worker_s": round(ours.cost_s, 2),
        "gap_percent": _gap(ours, oracle),
    }


def _gap(ours: Outcome, oracle: WindowedOracle | None) -> float | None:
    """How much more than the oracle's ours cost."""
    return None if oracle is None else round(100 * (ours.cost_s / oracle.outcome.cost_s - 1), 2)


def _by_window(run: Outcome) -> list[int]:
    """Cost of each of the ten windows, worker-seconds."""
    return [round(run.cost_between(WINDOW_S * window, WINDOW_S * (window + 1))) for window in range(10)]


def oscillation_case(say: Say) -> dict[str, Any]:
    """Constant load for an hour; square waves from fast to slow."""
    plant = Plant(most=64)
    policy = policy_for(plant)
    table = default_table()
    steady = {
        str(sessions): len(play(constant(sessions, 3600), plant, policy, table).actions)
        for sessions in (3, 20, 57)
    }
    waves = {}
    for period_s in (20, 60, 120, 300, 600):
        run = play(square(10, 40, period_s, 1800), plant, policy, table)
        waves[str(period_s)] = {"actions": len(run.actions), "undone": undone(run, policy)}
    say(f"constant: {steady} actions; square waves: {waves}")
    return {
        "constant_actions": steady,
        "constant_actions_max": max(steady.values()),
        "square": waves,
        "undone_within_cooldown": sum(wave["undone"] for wave in waves.values()),
    }


def undone(run: Outcome, policy: ControlPolicy) -> int:
    """Scale-outs taken back within the scale-in cool-down, and scale-ins within the scale-out cool-down."""
    count = 0
    for (t0, a0, b0), (t1, a1, b1) in pairwise(run.actions):
        back = (b0 - a0) * (b1 - a1) < 0
        cooldown_s = policy.in_cooldown_s if b0 > a0 else policy.out_cooldown_s
        count += back and t1 - t0 < cooldown_s
    return count

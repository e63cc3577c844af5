"""The cases of `turboserve bench autoscale`: each gives the figures of one section of the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from turboserve.bench.autoscale.azure import azure
from turboserve.bench.autoscale.oracles import cheapest_plan, slot_needs, windowed_oracle
from turboserve.bench.autoscale.outcome import Outcome
from turboserve.bench.autoscale.plant import Plant
from turboserve.bench.autoscale.production import production
from turboserve.bench.autoscale.profiling import Segment, build_table, cut, search, volatility
from turboserve.bench.autoscale.shapes import constant, square
from turboserve.bench.autoscale.simulation import Simulation
from turboserve.bench.autoscale.sizers import Controlled, Fixed, Planned, Sizer, Utilization, flat_table
from turboserve.bench.autoscale.trace import Trace
from turboserve.contracts.autoscale import ProfileTable, Provenance

Say = Callable[[str], None]
WINDOW_RHOS = (0.35, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
ORACLE_RHOS = (0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.8, 0.85, 0.9, 0.95)
PAPER_WEIGHT = (0.2,)
"""λ: "in this experiment, λ is fixed at 0.2"."""
SLOT_S = 60.0


def policy_for(plant: Plant, **changed: Any) -> ControlPolicy:
    """The product's defaults with this plant's limits."""
    horizon_s = plant.start_up_s + 1.0
    return ControlPolicy(most=plant.most, capacity=plant.capacity, horizon_s=horizon_s, **changed)


def play(trace: Trace, plant: Plant, policy: ControlPolicy, table: ProfileTable) -> Outcome:
    """The controller over a trace; the pool begins as the table wants it for who is there at 0."""
    size = budget(trace.active()[0], plant.capacity, table.levels[0], most=plant.most)
    return Simulation(trace, plant, Controlled(policy, table, min(max(size, 1), plant.most))).run()


def profiling_case(segments: int, say: Say) -> dict[str, Any]:
    """Tables 5 and 6: ten levels, each with segments of one burst size."""
    plant = Plant()
    policy = policy_for(plant)
    levels = []
    for level, burst in enumerate(BURSTS, 1):
        traces = [segment(burst, seed) for seed in range(segments)]
        found = search(
            [Segment(t, volatility(t, policy)) for t in traces], plant, policy, weights=PAPER_WEIGHT
        )
        say(f"profiling: level {level}: ρ̂ {found.rho:g}, {found.cost_s:.0f} worker-s")
        levels.append(
            {
                "level": level,
                "volatility": round(found.volatility, 3),
                "arrivals": burst,
                "peak_active": traces[0].peak,
                "latency_weight": found.weight,
                "target_utilization": found.rho,
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
    """Tables 7 to 10: the unseen ten windows, with a table profiled on other ones, against the oracle."""
    plant = Plant(start_up_s=start_up_s)
    policy = policy_for(plant)
    pieces = [
        piece
        for seed in range(training)
        for piece in cut(other_windows(seed), WINDOW_S, policy.in_window_s, policy)
    ]
    provenance = Provenance(source=f"{training} drawn traces of ten windows", segments=len(pieces))
    table = build_table(pieces, 5, plant, policy, provenance, WINDOW_RHOS, PAPER_WEIGHT)
    trace = ten_windows()
    ours = play(trace, plant, policy, table)
    say(f"ten windows, start-up {start_up_s:g} s: {ours.cost_s:.0f} worker-s, {ours.late} late")
    oracle = windowed_oracle(trace, plant, policy, WINDOW_S, ORACLE_RHOS)
    say(f"ten windows, start-up {start_up_s:g} s: oracle {oracle.outcome.cost_s if oracle else math.nan:.0f}")
    others = [play(other_windows(seed), plant, policy, table) for seed in range(100, 104)]
    ends = [WINDOW_S * (window + 1) - 0.1 for window in range(10)]
    return {
        "start_up_s": start_up_s,
        "table": [
            {"volatility_from": row.volatility_from, "target_utilization": row.target_utilization,
             "segments": row.segments, "pass_rate": row.pass_rate}
            for row in table.levels
        ],
        "ours": {**ours.figures(), "window_end_sizes": [ours.size_at(at) for at in ends]},
        "oracle": oracle
        and {
            **oracle.outcome.figures(),
            "targets": list(oracle.targets),
            "window_end_sizes": [oracle.outcome.size_at(at) for at in ends],
        },
        "gap_percent": oracle and round(100 * (ours.cost_s / oracle.outcome.cost_s - 1), 2),
        "chunks_above_target": ours.late,
        "four_more_unseen": {
            "late_chunks": [run.late for run in others],
            "activations": [run.placed for run in others],
        },
    }  # fmt: skip


def production_case(names: Sequence[str], say: Say) -> dict[str, Any]:
    """T1–T3 against the dynamic program of 7.4, both at ρ̂ = 0.8; reactive and predictive."""
    plant = Plant(most=64)
    found: dict[str, Any] = {}
    for name in names:
        trace = production(name)
        plan, oracle_s = cheapest_plan(
            slot_needs(trace, plant.capacity, 0.8, SLOT_S, plant.most), SLOT_S, plant.start_up_s
        )
        replayed = Simulation(trace, plant, Planned(plan, SLOT_S, plant.start_up_s)).run()
        rows: dict[str, Any] = {"oracle": {**replayed.figures(), "cost_worker_s": oracle_s}}
        for mode, predictive in (("reactive", False), ("predictive", True)):
            run = play(trace, plant, policy_for(plant, predictive=predictive), flat_table(0.8))
            gap = round(100 * (run.cost_s / oracle_s - 1), 2)
            rows[mode] = {**run.figures(), "gap_percent": gap}
            say(f"{name}, {mode}: {gap:+.1f} % of the oracle's cost, {run.late} late of {run.placed}")
        found[name] = rows
    return {
        "traces": found,
        "oracle_gap_percent": {mode: _gaps(found, mode) for mode in ("reactive", "predictive")}
        | _gaps(found, "reactive"),
    }


def _gaps(found: dict[str, Any], mode: str) -> dict[str, float]:
    """Sizes of the gaps: below the oracle is a gap, too."""
    gaps = [abs(rows[mode]["gap_percent"]) for rows in found.values()]
    return {"mean": round(sum(gaps) / len(gaps), 2), "max": max(gaps)}


def real_case(scales: Sequence[int], lasts_s: float, say: Say) -> dict[str, Any]:
    """Azure arrivals against fixed pools, a utilisation autoscaler and the oracle."""
    plant = Plant(most=64)
    table = default_table()
    found: dict[str, Any] = {}
    for stretch in scales:
        trace = azure(stretch, lasts_s)
        needs = slot_needs(trace, plant.capacity, 1.0, SLOT_S, plant.most)
        plan, oracle_s = cheapest_plan(needs, SLOT_S, plant.start_up_s)
        begin = max(needs[0], 1)
        mean = math.ceil(sum(trace.active()) / len(trace.active()) / plant.capacity / 0.8)
        sizers: dict[str, Sizer] = {
            "reactive": Controlled(policy_for(plant), table, begin),
            "predictive": Controlled(policy_for(plant, predictive=True), table, begin),
            "predictive_dense": Controlled(policy_for(plant, predictive=True), flat_table(0.8), begin),
            "reactive_dense": Controlled(policy_for(plant), flat_table(0.8), begin),
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
        ours = rows["predictive"]
        say(f"azure x{stretch}: {ours['cost_of_oracle']:.2f} of the oracle, {ours['late_chunks']} late")
    return found


def start_up_sweep(delays: Sequence[float], say: Say) -> dict[str, Any]:
    """T1, reactive and predictive, by the time a worker takes to start."""
    trace = production("T1")
    found: dict[str, Any] = {}
    for start_up_s in delays:
        plant = replace(Plant(most=64), start_up_s=start_up_s)
        needs = slot_needs(trace, plant.capacity, 0.8, SLOT_S, plant.most)
        _, oracle_s = cheapest_plan(needs, SLOT_S, start_up_s)
        rows = {}
        for mode, predictive in (("reactive", False), ("predictive", True)):
            run = play(trace, plant, policy_for(plant, predictive=predictive), flat_table(0.8))
            rows[mode] = {
                "gap_percent": round(100 * (run.cost_s / oracle_s - 1), 2),
                "late_chunks": run.late,
                "wait_session_s": round(run.wait_s, 1),
            }
        found[f"{start_up_s:g}"] = rows
        say(f"T1, start-up {start_up_s:g} s: {rows}")
    return found


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

"""Sweeps of all systems over one draw of a trace: Figures 7 and 8 read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from turboserve.experiments.autoscale.plant import Resume
from turboserve.experiments.autoscale.production import production
from turboserve.experiments.paper.experiment import Scale
from turboserve.experiments.paper.grids import describe_grid, elastic_settings, fixed_settings
from turboserve.experiments.paper.profiles import (
    CLUSTER_OF,
    OLD_SIGNALS_S,
    SIGNALS,
    cluster,
    describe,
)
from turboserve.experiments.paper.systems import BOUND, SAME_RUNS, SYSTEMS, perfect_elasticity, sweep
from turboserve.experiments.result_folder import PaperCell

TRACES = ("T1", "T2", "T3", "T4", "T5", "T6")
SIZES = ("1.3B", "7B")
OLD_TRACES, OLD_SIZES = TRACES[:3], SIZES[:1]
"""What is run again with signals of an age."""
OLD = "aged_signals"
START_UP_S = 10.0
RESUME = Resume.RETURNS
LATENCIES = ("served_ms", "with_waits_ms")
HEADLINE = "with_waits_ms"
DECLARED = {
    "plants": {f"{gpu} {size}": describe(cluster(f"{gpu} {size}", START_UP_S)) for gpu in ("H20", "B300")
               for size in SIZES},
    "systems": {name: str(system) for name, system in SYSTEMS.items()},
    "resume": f"{RESUME}: a resumed session returns to its worker if there is room, in every system",
    "signals": f"{SIGNALS} The headline has an age of 0. `{OLD}` has {OLD_SIGNALS_S:g} s, on "
    f"{', '.join(OLD_TRACES)} and {OLD_SIZES[0]}.",
    "batches": "Sessions of one worker run as batches in every system. The paper's base runs them one after "
    "the other.",
    "MAG": "The paper's models have a fixed window of keys and values, so states have one size, the memory "
    "in use is the number of sessions, and MAG chooses as LAG does. LAG's runs are read for it.",
    "grid": {
        "elastic, T1 to T3": describe_grid(cluster("H20 1.3B", START_UP_S)),
        "elastic, T4 to T6": describe_grid(cluster("B300 1.3B", START_UP_S)),
        "fixed": "Sizes from the least that holds the peak, with K and with the least capacity that holds "
        "the peak.",
        "left out": "capacities with which the cluster does not hold the trace's peak",
        "at most": "target_chunk_s = L(n): workers take no more than n sessions, in every system.",
    },
    BOUND: "Workers come and go with every session, and none waits for a slot. A policy that lets "
    "sessions wait may cost less, so it is no bound for `served_ms`.",
}  # fmt: skip


def cells(experiment: str, scale: Scale) -> list[PaperCell]:
    names, sizes = (TRACES[:1], SIZES[:1]) if scale.quick else (TRACES, SIZES)
    return [
        PaperCell(
            experiment,
            f"{name}, {size}, draw {seed}, signals {age_s:g} s",
            run,
            (name, size, seed, age_s),
        )
        for age_s in (0.0, OLD_SIGNALS_S)
        for name in names
        for size in sizes
        if not age_s or (name in OLD_TRACES and size in OLD_SIZES)
        for seed in scale.seeds
    ]


def run(name: str, size: str, seed: int, signal_age_s: float) -> dict[str, Any]:
    """Run every system with each of its settings."""
    plant = replace(cluster(f"{CLUSTER_OF[name]} {size}", START_UP_S), signal_age_s=signal_age_s)
    trace = production(name, seed)
    settings = {True: elastic_settings(plant, trace.peak), False: fixed_settings(trace, plant)}
    found = {
        name: sweep(system, trace, plant, settings[system.elastic], RESUME)
        for name, system in SYSTEMS.items()
        if name not in SAME_RUNS
    }
    found |= {name: found[same] for name, same in SAME_RUNS.items()}
    return {**found, BOUND: perfect_elasticity(trace, plant)}


def by_age(results: Mapping[PaperCell, Any]) -> tuple[dict[PaperCell, Any], dict[PaperCell, Any]]:
    """Return the results with fresh signals, and those with signals of an age."""
    fresh = {cell: found for cell, found in results.items() if not cell.arguments[3]}
    return fresh, {cell: found for cell, found in results.items() if cell.arguments[3]}

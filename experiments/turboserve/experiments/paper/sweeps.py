"""Sweeps of all systems over one draw of a trace: Figures 7 and 8 read them."""

from __future__ import annotations

from typing import Any

from turboserve.experiments.autoscale.plant import Resume
from turboserve.experiments.autoscale.production import production
from turboserve.experiments.autoscale.profiling import RHO_GRID
from turboserve.experiments.paper.cells import PaperCell
from turboserve.experiments.paper.experiment import Scale
from turboserve.experiments.paper.profiles import CLUSTER_OF, cluster, describe
from turboserve.experiments.paper.systems import (
    BOUND,
    QUICK_RHO_GRID,
    SYSTEMS,
    perfect_elasticity,
    pool_sizes,
    sweep,
)

TRACES = ("T1", "T2", "T3", "T4", "T5", "T6")
SIZES = ("1.3B", "7B")
START_UP_S = 10.0
RESUME = Resume.RETURNS
LATENCIES = ("served_ms", "with_waits_ms")
HEADLINE = "with_waits_ms"
DECLARED = {
    "plants": {f"{gpu} {size}": describe(cluster(f"{gpu} {size}", START_UP_S)) for gpu in ("H20", "B300")
               for size in SIZES},
    "systems": {name: str(system) for name, system in SYSTEMS.items()},
    "resume": f"{RESUME}: a resumed session returns to its worker if there is room, in every system",
    "signals": "Loads are those of the instant, for all systems.",
    "batches": "Sessions of one worker run as batches in every system. The paper's base runs them one after "
    "the other.",
    "MAG": "States have one size, so the memory in use is the number of sessions, and MAG equals LAG.",
    "grid": {"target_utilization": list(RHO_GRID), "quick": list(QUICK_RHO_GRID)},
    BOUND: "Workers come and go with every session, and none waits for a slot. A policy that lets "
    "sessions wait may cost less, so it is no bound for `served_ms`.",
}  # fmt: skip


def cells(experiment: str, scale: Scale) -> list[PaperCell]:
    names, sizes = (TRACES[:1], SIZES[:1]) if scale.quick else (TRACES, SIZES)
    return [
        PaperCell(experiment, f"{name}, {size}, draw {seed}", run, (name, size, seed, scale.quick))
        for name in names
        for size in sizes
        for seed in scale.seeds
    ]


def run(name: str, size: str, seed: int, quick: bool) -> dict[str, Any]:
    """Run every system with each of its settings."""
    plant = cluster(f"{CLUSTER_OF[name]} {size}", START_UP_S)
    trace = production(name, seed)
    # The large traces take minutes with the whole grid.
    coarse = quick or plant.most > 16
    rhos, sizes = QUICK_RHO_GRID if coarse else RHO_GRID, pool_sizes(trace, plant, coarse)
    found = {
        system: sweep(SYSTEMS[system], trace, plant, sizes, rhos, (False,), RESUME) for system in SYSTEMS
    }
    return {**found, BOUND: perfect_elasticity(trace, plant)}

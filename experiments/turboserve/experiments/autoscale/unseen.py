"""The case `unseen`: the default controller on traces that nothing was tuned on, against fronts.

Every system begins with the same workers and sees the same signals. The *front* of a system is the lower
convex hull of its runs over one grid, with the future known: the best constant ρ̂ for this trace, and the best
target of a utilization autoscaler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from turboserve.autoscaler.control.policy import default_table
from turboserve.experiments.autoscale import bursts
from turboserve.experiments.autoscale.absorption import Front, point
from turboserve.experiments.autoscale.appendix import calm, other_windows
from turboserve.experiments.autoscale.oracles import cheapest_plan, slot_needs
from turboserve.experiments.autoscale.outcome import ScalingOutcome
from turboserve.experiments.autoscale.plant import Plant, policy_for
from turboserve.experiments.autoscale.production import azure, production
from turboserve.experiments.autoscale.simulation import Simulation
from turboserve.experiments.autoscale.sizers import Controlled, Sizer, Utilization, flat_table
from turboserve.experiments.autoscale.trace import WorkloadTrace

SLOT_S = 60.0
LASTS_S = 1800.0
CONSTANTS = (0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
UTILIZATIONS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
MOST = 128
TUNED: Mapping[str, Callable[[], WorkloadTrace]] = {
    **{name: partial(production, name, 0) for name in ("T1", "T2")},
    "azure x1": partial(azure, 1, LASTS_S),
    "azure x16": partial(azure, 16, LASTS_S),
    "calm 32": partial(calm, 32, 0),
    **{f"other windows {seed}": partial(other_windows, seed) for seed in (0, 1)},
    **{f"{name} 0": partial(bursts.GENERATORS[name], 0) for name in ("modulated", "clustered", "renewal")},
}
"""Traces on which the learner's candidates and margins were chosen, at a start-up of 10 s."""
UNSEEN: Mapping[str, Callable[[], WorkloadTrace]] = {
    "M": partial(production, "M", 0),
    **{f"azure x{stretch} seed 1": partial(azure, stretch, LASTS_S, 1) for stretch in (4, 16)},
    **{f"{name} {seed}": partial(bursts.GENERATORS[name], seed)
       for name in ("self-exciting", "flash crowds") for seed in (0, 1)},
    **{f"other windows {seed}": partial(other_windows, seed) for seed in range(100, 104)},
    **{f"{name} 1": partial(bursts.GENERATORS[name], 1) for name in ("modulated", "clustered", "renewal")},
    **{name: partial(production, name, 0) for name in ("T4", "T6", "T5")},
}  # fmt: skip
"""Traces on which nothing was chosen; the last three of the generators in `TUNED` have other seeds."""


def unseen_case(name: str, start_up_s: float, progress: Callable[[str], None]) -> dict[str, Any]:
    """Compare the controllers on one trace."""
    trace = {**TUNED, **UNSEEN}[name]()
    plant = Plant(most=MOST, start_up_s=start_up_s)
    policy = policy_for(plant)
    needs = slot_needs(trace, plant.capacity, 1.0, SLOT_S, plant.most)
    _, oracle_s = cheapest_plan(needs, SLOT_S, start_up_s)
    begin = max(needs[0], 1)

    def replayed(sizer: Sizer) -> ScalingOutcome:
        return Simulation(trace, plant, sizer).run()

    constants = {
        f"constant_{rho:g}": replayed(Controlled(policy, flat_table(rho), begin)) for rho in CONSTANTS
    }
    utilizations = {
        f"utilization_{rho:g}": replayed(Utilization(begin, rho, 1, plant.most)) for rho in UTILIZATIONS
    }
    fronts = {
        "constant": Front([point(run) for run in constants.values()]),
        "utilization": Front([point(run) for run in utilizations.values()]),
    }
    ours = {
        "learned": Controlled(policy_for(plant, learns=True), default_table(), begin),
        "shipped_table": Controlled(policy, default_table(), begin),
    }
    price_s = policy.lateness_price_s
    found: dict[str, Any] = {"oracle_cost_worker_s": round(oracle_s, 1), "start_up_s": start_up_s}
    for system, sizer in ours.items():
        run = replayed(sizer)
        found[system] = figures(run, oracle_s) | {
            f"dearer_than_{front}_percent": _dearer(run, hull) for front, hull in fronts.items()
        }
        progress(f"{name}, start-up {start_up_s:g} s, {system}: {found[system]}")
    found["baselines"] = {key: figures(run, oracle_s) for key, run in {**constants, **utilizations}.items()}
    best = min(run.cost_s + price_s * run.late_first for run in constants.values())
    for system in ours:
        row = found[system]
        total = row["cost_worker_s"] + price_s * row["late_activations"]
        row["priced_above_best_constant_percent"] = round(100 * (total / best - 1), 2)
    return found


def figures(run: ScalingOutcome, oracle_s: float) -> dict[str, Any]:
    """Return the figures of one run for JSON."""
    return {
        "cost_worker_s": round(run.cost_s, 1),
        "cost_of_oracle": round(run.cost_s / oracle_s, 3),
        "activations": run.placed,
        "late_activations": run.late_first,
    }


def _dearer(run: ScalingOutcome, front: Front) -> float | None:
    """Return by how many percent a run costs more than the front at its lateness; None: no run of the front
    lets so few be late."""
    cost_s = front.cost_at(run.late_first)
    return None if cost_s is None else round(100 * (run.cost_s / cost_s - 1), 2)

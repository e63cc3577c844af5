"""How cost and lateness depend on what the paper leaves open: start-up, signal age, η, δ and windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from turboserve.experiments.autoscale.plant import policy_for
from turboserve.experiments.autoscale.production import production
from turboserve.experiments.autoscale.simulation import Simulation
from turboserve.experiments.autoscale.sizers import Controlled, flat_table
from turboserve.experiments.paper.experiment import Scale
from turboserve.experiments.paper.metrics import as_json, mean_interval, measure
from turboserve.experiments.paper.profiles import SIGNALS, appendix, describe
from turboserve.experiments.result_folder import PaperCell
from turboserve.scheduler.placement.rebalance import MinMaxRebalancer
from turboserve.scheduler.placement.types import Weights

NAME = "sensitivity"
TRACE, RHO, BEGIN = "T1", 0.8, 8
USUAL: Mapping[str, float] = {
    "start_up_s": 10.0, "signal_age_s": 0.0, "eta": 0.1, "delta": 0.1, "in_window_s": 10.0,
    "peak_window_s": 120.0,
}  # fmt: skip
"""Values of what is not varied: those that ship, and the start-up of the other experiments."""
VALUES: Mapping[str, tuple[float, ...]] = {
    "start_up_s": (2.0, 5.0, 10.0, 20.0, 30.0, 60.0),
    "signal_age_s": (0.0, 1.0, 2.0, 5.0, 10.0),
    "eta": (0.0, 0.1, 0.5, 1.0, 5.0),
    "delta": (0.0, 0.05, 0.1, 0.15, 0.2),
    "in_window_s": (0.0, 10.0, 30.0, 60.0),
    "peak_window_s": (0.0, 30.0, 120.0, 300.0, 600.0),
}
PAPER = {"values": "η is small; δ, W and start-up are lost or not given; ages of signals are not stated."}
WANTED = {"cost_change_percent_within_factor_2": 10.0}
NEAR = {"eta": (0.1, 0.5), "delta": (0.05, 0.15), "in_window_s": (10.0, 30.0)}
"""Neighbors of the shipped value: a result that depends on them more than wanted is fragile."""


def cells(scale: Scale) -> list[PaperCell]:
    return [
        PaperCell(NAME, f"{name} {value:g}, draw {seed}", run, (name, value, seed))
        for name, values in VALUES.items()
        for value in (values[:: len(values) - 1] if scale.quick else values)
        for seed in scale.seeds
    ]


def run(name: str, value: float, seed: int, trace_name: str = TRACE) -> dict[str, Any]:
    """Replay one draw of the trace with one value changed."""
    chosen = {**USUAL, name: value}
    plant = replace(appendix(chosen["start_up_s"]), signal_age_s=chosen["signal_age_s"])
    policy = policy_for(
        plant,
        hysteresis=chosen["delta"],
        in_window_s=chosen["in_window_s"],
        peak_window_s=chosen["peak_window_s"],
    )
    sizer = Controlled(policy, flat_table(RHO), BEGIN)
    rebalancer = MinMaxRebalancer(Weights(eta=chosen["eta"]))
    return as_json(measure(Simulation(production(trace_name, seed), plant, sizer, rebalancer).run()))


def report(scale: Scale, results: Mapping[PaperCell, Any]) -> dict[str, Any]:
    found: dict[str, dict[float, list[Any]]] = {}
    for cell, result in results.items():
        name, value, _ = cell.arguments
        found.setdefault(name, {}).setdefault(value, []).append(result)
    ours = {
        name: [{"value": value, **_summary(draws)} for value, draws in sorted(by_value.items())]
        for name, by_value in found.items()
    }
    changes = {name: _change_percent(ours.get(name, []), near) for name, near in NEAR.items()}
    known = [change for change in changes.values() if change is not None]
    return {
        "paper": PAPER,
        "ours": ours,
        "interval": {name: [row["cost_worker_s"] for row in rows_] for name, rows_ in ours.items()},
        "ratio": None,
        "wanted": WANTED,
        "met": {
            "cost_change_percent_within_factor_2": bool(known)
            and max(known) <= WANTED["cost_change_percent_within_factor_2"]
        },
        "declared": {
            "trace": TRACE,
            "plant": describe(appendix(USUAL["start_up_s"])),
            "controller": f"constant ρ̂ {RHO:g}, the shipped policy but for the varied value",
            "usual": dict(USUAL),
            "signal_age_s": SIGNALS,
            "cost_change_percent": changes,
        },
    }


def _summary(draws: list[Any]) -> dict[str, Any]:
    names = ("cost_worker_s", "late_percent", "migrations", "actions", "mean_ms")
    return {name: mean_interval([draw[name] for draw in draws]) for name in names}


def _change_percent(rows_: list[dict[str, Any]], near: tuple[float, ...]) -> float | None:
    """Return by how much cost differs between the neighbors; None if they have not been run."""
    costs = [row["cost_worker_s"]["mean"] for row in rows_ if row["value"] in near]
    return round(100 * (max(costs) / min(costs) - 1), 3) if len(costs) == len(near) else None


def rows(report_: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (what, paper, ours) for the terminal."""
    return [
        (
            f"{name} {row['value']:g}",
            "",
            f"{row['cost_worker_s']['mean']:.0f} worker-s, {row['late_percent']['mean']:.2f} % late, "
            f"{row['migrations']['mean']:.0f} migrations",
        )
        for name, values in report_["ours"].items()
        for row in values
    ]

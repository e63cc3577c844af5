"""Table 3: twelve minutes of T1 on Cluster 1, window by window: sizes of the pool and migrations (7.5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turboserve.autoscaler.control.policy import default_table
from turboserve.experiments.autoscale.demand import TARGET
from turboserve.experiments.autoscale.outcome import ScalingOutcome
from turboserve.experiments.autoscale.plant import Plant, policy_for
from turboserve.experiments.autoscale.production import production
from turboserve.experiments.autoscale.simulation import Simulation
from turboserve.experiments.autoscale.sizers import Controlled, flat_table
from turboserve.experiments.paper.experiment import Scale
from turboserve.experiments.paper.metrics import as_json, mean_interval, measure
from turboserve.experiments.paper.profiles import appendix, cluster, describe
from turboserve.experiments.result_folder import PaperCell

NAME = "table3"
WINDOW_S, WINDOWS = 120.0, 6
BEGIN = 8
"""Workers at the beginning: the paper's snapshot begins with 8 GPUs."""
PLANTS = ("K = 5", "K = 16")
"""K of Cluster 1 is lost. With K = 5 (Appendix A) the pool begins near 8 GPUs, as the paper's does."""
TABLES = ("shipped table", "constant 0.8")
PAPER = {
    "sizes": "Begins at 8 GPUs, contracts, expands, later contracts.",
    "migrations": "Tens of sessions in most windows, most of them in the last.",
    "note": "The cells of the table are lost, so there is no ratio.",
}
TENS = (10, 99)
WANTED = {"pool_contracts_first": True, "windows_with_tens_of_migrations_share": 0.5}


def cells(scale: Scale) -> list[PaperCell]:
    return [
        PaperCell(NAME, _name(plant, table, seed, delay), run, (plant, table, seed, delay))
        for delay in scale.start_ups
        for plant in PLANTS
        for table in TABLES
        for seed in scale.seeds
    ]


def _name(plant: str, table: str, seed: int, delay: float) -> str:
    return f"{plant}, {table}, draw {seed}, start-up {delay:g} s"


def plant_of(name: str, start_up_s: float) -> Plant:
    return appendix(start_up_s) if name == PLANTS[0] else cluster("H20 1.3B", start_up_s)


def run(plant_name: str, table: str, seed: int, start_up_s: float) -> dict[str, Any]:
    """Replay the first twelve minutes of one draw of T1."""
    plant = plant_of(plant_name, start_up_s)
    parameters = default_table() if table == TABLES[0] else flat_table(TARGET)
    simulation = Simulation(production("T1", seed), plant, Controlled(policy_for(plant), parameters, BEGIN))
    ends_s = WINDOW_S * WINDOWS
    simulation.advance(ends_s)
    simulation.fleet.finish(ends_s)
    outcome = simulation.outcome
    return {**as_json(measure(outcome)), "windows": [_window(outcome, number) for number in range(WINDOWS)]}


def _window(outcome: ScalingOutcome, number: int) -> dict[str, Any]:
    begins_s, ends_s = WINDOW_S * number, WINDOW_S * (number + 1)
    actions = [
        {"at_s": round(at, 1), "from": before, "to": after}
        for at, before, after in outcome.actions
        if begins_s <= at < ends_s
    ]
    size = max(((at, size) for at, size in outcome.sizes if at < ends_s), key=lambda each: each[0])[1]
    return {
        "actions": actions,
        "gpus_at_end": size,
        "migrations": sum(begins_s <= at < ends_s for at in outcome.migrated_at),
    }


def report(scale: Scale, results: Mapping[PaperCell, Any]) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    for cell, found in results.items():
        plant, table, _, delay = cell.arguments
        ours.setdefault(f"{delay:g} s", {}).setdefault(f"{plant}, {table}", []).append(found)
    summary = {
        delay: {name: _summary(draws) for name, draws in by_name.items()} for delay, by_name in ours.items()
    }
    first = summary[f"{scale.start_ups[0]:g} s"][f"{PLANTS[0]}, {TABLES[0]}"]
    return {
        "paper": PAPER,
        "ours": summary,
        "interval": first["migrations_by_window"],
        "ratio": None,
        "wanted": WANTED,
        "met": {
            "pool_contracts_first": first["contracts_first_share"] == 1.0,
            "windows_with_tens_of_migrations_share": first["tens_share"]
            >= WANTED["windows_with_tens_of_migrations_share"],
        },
        "declared": {
            "plants": {name: describe(plant_of(name, scale.start_ups[0])) for name in PLANTS},
            "windows": f"{WINDOWS} of {WINDOW_S:g} s from the beginning of T1; the pool begins with {BEGIN}",
            "headline": f"{PLANTS[0]}, {TABLES[0]}, start-up {scale.start_ups[0]:g} s",
        },
    }


def _summary(draws: list[Any]) -> dict[str, Any]:
    windows = [[draw["windows"][number] for draw in draws] for number in range(WINDOWS)]
    counts = [window["migrations"] for draw in draws for window in draw["windows"]]
    firsts = [[action for window in draw["windows"] for action in window["actions"]][:1] for draw in draws]
    return {
        "migrations_by_window": [mean_interval([w["migrations"] for w in window]) for window in windows],
        "gpus_by_window": [mean_interval([w["gpus_at_end"] for w in window]) for window in windows],
        "actions_by_window": [mean_interval([len(w["actions"]) for w in window]) for window in windows],
        "contracts_first_share": sum(f[0]["to"] < f[0]["from"] for f in firsts if f) / len(firsts),
        "tens_share": sum(TENS[0] <= count <= TENS[1] for count in counts) / len(counts),
        "late_percent": mean_interval([draw["late_percent"] for draw in draws]),
    }


def rows(report_: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (what, paper, ours) for the terminal."""
    shown = []
    for delay, found in report_["ours"].items():
        for name, row in found.items():
            sizes = ", ".join(f"{each['mean']:.1f}" for each in row["gpus_by_window"])
            counts = ", ".join(f"{each['mean']:.0f}" for each in row["migrations_by_window"])
            shown.append((f"{name}, start-up {delay}: GPUs by window", "8, down, up, down", sizes))
            shown.append((f"{name}, start-up {delay}: migrations by window", "tens, last most", counts))
    return shown

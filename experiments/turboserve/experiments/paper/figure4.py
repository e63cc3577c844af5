"""Figure 4: migration and autoscaling, alone and together, on trace M with eight GPUs (3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from turboserve.experiments.autoscale.plant import Plant, Resume
from turboserve.experiments.autoscale.production import production
from turboserve.experiments.paper.experiment import Scale
from turboserve.experiments.paper.grids import PoolSetting, describe_grid, elastic_settings
from turboserve.experiments.paper.metrics import Setting, curve, mean_interval, ratio, reduction_percent
from turboserve.experiments.paper.profiles import SIGNAL_AGES_S, SIGNALS, cluster, describe
from turboserve.experiments.paper.systems import STUDY, sweep
from turboserve.experiments.result_folder import PaperCell

NAME = "figure4"
GPUS = 8
LATENCIES = ("served_ms", "with_waits_ms")
WHAT = ("latency_reduction_percent", "cost_reduction_percent")
HEADLINE = (Resume.RETURNS, "with_waits_ms")
PAPER = {
    "migration": {"latency_reduction_percent": 26.53, "cost_reduction_percent": 0.0},
    "autoscaling": {"latency_reduction_percent": 0.0, "cost_reduction_percent": 32.57},
    "joint": {"latency_reduction_percent": 8.17, "cost_reduction_percent": 40.25},
}
WANTED = {
    "migration_latency_reduction_percent": 28.0,
    "autoscaling_cost_reduction_percent": 34.0,
    "joint_latency_reduction_percent": 10.0,
    "joint_cost_reduction_percent": 42.0,
}


def plant_of(start_up_s: float, signal_age_s: float = 0.0) -> Plant:
    return replace(cluster("H20 1.3B", start_up_s), most=GPUS, signal_age_s=signal_age_s)


def conditions(scale: Scale) -> list[tuple[float, float]]:
    """Return (start-up, age of signals): ages are varied at the first start-up."""
    first = scale.start_ups[0]
    return [(delay, 0.0) for delay in scale.start_ups] + [(first, age) for age in SIGNAL_AGES_S if age]


def _key(rule: str, latency: str, start_up_s: float, age_s: float) -> str:
    signals = f"; signals {age_s:g} s old" if age_s else ""
    return f"resume: {rule}; {latency}; start-up {start_up_s:g} s{signals}"


def cells(scale: Scale) -> list[PaperCell]:
    return [
        PaperCell(
            NAME,
            f"{rule}, draw {seed}, start-up {delay:g} s, signals {age_s:g} s",
            run,
            (rule.value, seed, delay, age_s),
        )
        for delay, age_s in conditions(scale)
        for rule in (Resume.RETURNS, Resume.ANYWHERE)
        for seed in scale.seeds
    ]


def run(rule: str, seed: int, start_up_s: float, signal_age_s: float) -> dict[str, Any]:
    """Run every system of the study on one draw of M."""
    trace, plant = production("M", seed), plant_of(start_up_s, signal_age_s)
    settings = {True: elastic_settings(plant, trace.peak), False: [PoolSetting(plant.capacity, GPUS)]}
    return {
        name: sweep(system, trace, plant, settings[system.elastic], Resume(rule))
        for name, system in STUDY.items()
    }


def report(scale: Scale, results: Mapping[PaperCell, Any]) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    for delay, age_s in conditions(scale):
        for rule in (Resume.RETURNS, Resume.ANYWHERE):
            draws = [
                result
                for cell, result in results.items()
                if (cell.arguments[0], cell.arguments[2], cell.arguments[3]) == (rule, delay, age_s)
            ]
            for latency in LATENCIES:
                ours[_key(rule, latency, delay, age_s)] = {
                    name: _summary(name, draws, latency) for name in STUDY if name != "base"
                }
    first = ours[_key(*HEADLINE, scale.start_ups[0], 0.0)]
    measured = {f"{name}_{what}": first[name][what] for name in PAPER for what in WHAT}
    return {
        "paper": PAPER,
        "ours": ours,
        "interval": measured,
        "ratio": {
            f"{name}_{what}": ratio(first[name][what]["mean"], published)
            for name, row in PAPER.items()
            for what, published in row.items()
            if published and first[name][what] is not None
        },
        "wanted": WANTED,
        "met": {
            f"{name}_{what}": _met(first[name], what, WANTED[f"{name}_{what}"])
            for name in PAPER
            for what in WHAT
            if f"{name}_{what}" in WANTED
        },
        "declared": {
            "plant": describe(plant_of(scale.start_ups[0])),
            "hardware": "Chunk times of the H20 and 1.3B: Table 4 has none of the H100 of the study.",
            "systems": {name: str(system) for name, system in STUDY.items()},
            "matched": "An elastic system's cheapest setting that is no slower than the base. A fixed pool "
            "has one. Draws in which no setting is as fast are not in the mean. A mean that lacks "
            "draws meets nothing.",
            "signals": f"{SIGNALS} Ages: {', '.join(f'{age:g}' for age in SIGNAL_AGES_S)} s.",
            "grid": describe_grid(plant_of(scale.start_ups[0])),
            "headline": f"a resumed session returns to its worker; waits included; start-up "
            f"{scale.start_ups[0]:g} s; signals without an age",
        },
    }


def quoted(draw: Mapping[str, Any], name: str, latency: str) -> Setting | None:
    """Return the run of a system that the figure quotes: the cheapest that is no slower than the base.

    A fixed pool has one setting. None: no setting of an elastic system is as fast.
    """
    tried = curve(draw[name], latency)
    if not STUDY[name].elastic:
        return tried.settings[0]
    return tried.at_latency(curve(draw["base"], latency).settings[0].worst_ms)


def _summary(name: str, draws: list[Any], latency: str) -> dict[str, Any]:
    costs, latencies = [], []
    for draw in draws:
        base, best = quoted(draw, "base", latency), quoted(draw, name, latency)
        if base is not None and best is not None:
            costs.append(reduction_percent(best.cost_worker_s, base.cost_worker_s))
            latencies.append(reduction_percent(best.worst_ms, base.worst_ms))
    return {
        "latency_reduction_percent": mean_interval(latencies) if latencies else None,
        "cost_reduction_percent": mean_interval(costs) if costs else None,
        "draws_without_a_match": len(draws) - len(costs),
    }


def _met(row: Mapping[str, Any], what: str, limit: float) -> bool:
    """Return whether the mean is within the limit. A mean that lacks draws meets nothing."""
    return row[what] is not None and not row["draws_without_a_match"] and row[what]["mean"] >= limit


def rows(report_: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (what, paper, ours) for the terminal."""
    shown = []
    for key, found in report_["ours"].items():
        for name, row in found.items():
            paper = PAPER.get(name)
            published = ""
            if paper is not None:
                latency_cut, cost_cut = (paper[what] for what in WHAT)
                published = f"latency −{latency_cut:g} %, cost −{cost_cut:g} %"
            latency, cost = (row[what] for what in WHAT)
            ours = "no setting is as fast as the base"
            if latency is not None and cost is not None:
                ours = f"latency {-latency['mean']:+.1f} %, cost {-cost['mean']:+.1f} %"
                if row["draws_without_a_match"]:
                    ours += f" ({row['draws_without_a_match']} draws without a match)"
            shown.append((f"{name}; {key}", published, ours))
    return shown

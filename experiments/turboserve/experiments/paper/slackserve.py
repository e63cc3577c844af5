"""SlackServe's five workloads and its ablations, with the cells of `turboserve bench slack`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from turboserve.experiments.paper.experiment import Scale
from turboserve.experiments.paper.metrics import mean_interval, ratio
from turboserve.experiments.result_folder import PaperCell
from turboserve.experiments.slack.cells import Cell, simulate
from turboserve.experiments.slack.command import FIRST_SEED
from turboserve.experiments.slack.policies import ABLATIONS, MAIN, POLICIES, SAME_RUNS
from turboserve.experiments.slack.profiles import PROFILES
from turboserve.experiments.slack.workloads import WORKLOADS

NAME = "slackserve"
PROFILE, RATE, WORKERS = "graded", 1.0, 16
STREAMS, QUICK_STREAMS = 120, 40
OURS = "ours"
ROWS = ("ours", "slackserve", "ts", "ts_chunk", "sdv2")
QUICK_ROWS, QUICK_WORKLOADS = ("ours", "sdv2"), ("steady", "burst")
PAPER = {
    "cpr": {"steady": 0.932, "switch": 0.90, "pause": 0.98, "trace": 0.95},
    "ablations": {
        "credit_only": 0.59,
        "bmpr": 0.81,
        "rehoming": 0.88,
        "slackserve": 0.93,
        "fixed_level": 0.86,
    },
    "ttfc_s": {"steady": 1.82},
    "note": "Causal-Forcing on 16 H100. The cell of `burst` is lost.",
}
WANTED = {"cpr_ratio_least": 1.0}


def cells(scale: Scale) -> list[PaperCell]:
    loads = QUICK_WORKLOADS if scale.quick else tuple(WORKLOADS)
    named = [(load, policy) for load in loads for policy in _built(QUICK_ROWS if scale.quick else ROWS)]
    if not scale.quick:
        named += [("steady", policy) for policy in _built(ABLATIONS)]
    streams = QUICK_STREAMS if scale.quick else STREAMS
    return [
        PaperCell(NAME, f"{load}, {policy}, draw {seed}", run, (load, policy, seed, streams))
        for load, policy in dict.fromkeys(named)
        for seed in scale.seeds
    ]


def _built(names: tuple[str, ...] | list[str]) -> list[str]:
    """Return the policies whose every part exists in the simulation, one for each kind of run."""
    runs = {SAME_RUNS.get(name, name): None for name in names if POLICIES[name].not_built is None}
    return list(runs)


def run(workload: str, policy: str, seed: int, streams: int, workers: int = WORKERS) -> dict[str, Any]:
    """Run one policy on one workload. Seeds count from the first that nothing was tuned on."""
    found = simulate(Cell(PROFILE, workload, policy, workers, streams, RATE, FIRST_SEED + seed))
    return {**asdict(found.metrics), "migrations": found.migrations, "violations": found.violations}


def report(scale: Scale, results: Mapping[PaperCell, Any]) -> dict[str, Any]:
    draws: dict[str, dict[str, list[Any]]] = {}
    for cell, found in results.items():
        load, policy = cell.arguments[:2]
        draws.setdefault(load, {}).setdefault(policy, []).append(found)
    ours: dict[str, Any] = {
        load: {policy: _summary(each) for policy, each in rows_.items()} for load, rows_ in draws.items()
    }
    own = SAME_RUNS.get(OURS, OURS)
    ratios = {
        load: ratio(rows_[own]["cpr"]["mean"], PAPER["cpr"][load])  # type: ignore[index]
        for load, rows_ in ours.items()
        if own in rows_ and load in PAPER["cpr"]
    }
    return {
        "paper": PAPER,
        "ours": ours,
        "interval": {load: rows_[own]["cpr"] for load, rows_ in ours.items() if own in rows_},
        "ratio": ratios,
        "wanted": WANTED,
        "met": {"cpr_ratio_least": bool(ratios) and min(ratios.values()) >= WANTED["cpr_ratio_least"]},
        "declared": {
            "profile": f"{PROFILE}, a chunk alone takes {PROFILES[PROFILE]().chunk_s:g} s",
            "workers": WORKERS,
            "rate": f"{RATE:g} streams a second",
            "streams": QUICK_STREAMS if scale.quick else STREAMS,
            "meaning": {name: POLICIES[name].meaning for rows_ in ours.values() for name in rows_},
            "not_built": {name: reason for name in dict.fromkeys((*MAIN, *ABLATIONS))
                          if (reason := POLICIES[name].not_built) is not None},
            "cpr": "Share of the chunks that are there when the viewer needs them.",
        },
    }  # fmt: skip


def _summary(draws: list[Any]) -> dict[str, Any]:
    names = ("cpr", "ttfc_mean_s", "stalls_per_stream", "quality", "migrations")
    found: dict[str, Any] = {name: mean_interval([float(draw[name]) for draw in draws]) for name in names}
    return {**found, "violations": sum(draw["violations"] for draw in draws)}


def rows(report_: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (what, paper, ours) for the terminal."""
    shown = []
    for load, by_policy in report_["ours"].items():
        for policy, row in by_policy.items():
            published = PAPER["cpr"].get(load) if policy == SAME_RUNS.get(OURS, OURS) else None  # type: ignore[attr-defined]
            text = f"CPR {row['cpr']['mean']:.3f}, first chunk {row['ttfc_mean_s']['mean']:.2f} s"
            shown.append((f"{load}, {policy}", "" if published is None else f"CPR {published:g}", text))
    return shown

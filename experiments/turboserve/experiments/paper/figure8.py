"""Figure 8: cost without migration and without autoscaling, at the same limit of the worst latency (7.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turboserve.experiments.paper import sweeps
from turboserve.experiments.paper.cells import PaperCell
from turboserve.experiments.paper.experiment import Scale
from turboserve.experiments.paper.metrics import above_percent, curve, mean_interval, ratio
from turboserve.experiments.paper.profiles import CLUSTER_OF, SESSIONS, cluster

NAME = "figure8"
OURS = "turboserve"
PARTS = ("without migration", "without autoscaling")
LIMITS = range(SESSIONS // 2, SESSIONS + 1)
"""Limits: L(n) for these n. The paper does not give its own."""
PAPER = {
    "without migration": {"mean": 15.0, "max": 28.0},
    "without autoscaling": {"mean": 42.9, "max": 80.4},
}
WANTED = {"without migration": 15.0, "without autoscaling": 45.0, "whole_system_cheapest_share": 1.0}


def cells(scale: Scale) -> list[PaperCell]:
    return sweeps.cells(NAME, scale)


def compare(found: Mapping[str, Any], part: str, latency: str, limits_ms: list[float]) -> list[float]:
    """Return by how many percent the system costs more without a part, at each limit that both can hold."""
    whole, less = curve(found[OURS], latency), curve(found[part], latency)
    pairs = ((whole.at_latency(limit), less.at_latency(limit)) for limit in limits_ms)
    return [
        above_percent(other.cost_worker_s, ours.cost_worker_s)
        for ours, other in pairs
        if ours is not None and other is not None
    ]


def report(scale: Scale, results: Mapping[PaperCell, Any]) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    for cell, found in results.items():
        name, size = cell.arguments[:2]
        latency_s = cluster(f"{CLUSTER_OF[name]} {size}").latency_s
        limits_ms = [1000 * latency_s[n] + 1e-3 for n in LIMITS]
        for latency in sweeps.LATENCIES:
            for part in PARTS:
                row = ours.setdefault(latency, {}).setdefault(part, {})
                row.setdefault(f"{name}, {size}", []).append(compare(found, part, latency, limits_ms))
    summary = {
        latency: {part: {name: _summary(draws) for name, draws in row.items()} for part, row in parts.items()}
        for latency, parts in ours.items()
    }
    headline = summary[sweeps.HEADLINE]
    means = {
        part: sum(row["more_percent"]["mean"] for row in rows_.values()) / len(rows_)
        for part, rows_ in headline.items()
    }
    values = [value for rows_ in ours[sweeps.HEADLINE].values() for draws in rows_.values() for draw in draws
              for value in draw]  # fmt: skip
    cheapest = sum(value >= 0 for value in values) / len(values)
    return {
        "paper": PAPER,
        "ours": {**summary, "whole_system_cheapest_share": round(cheapest, 4)},
        "interval": {part: {name: row["more_percent"] for name, row in rows_.items()}
                     for part, rows_ in headline.items()},
        "ratio": {part: ratio(means[part], PAPER[part]["mean"]) for part in PARTS},
        "wanted": WANTED,
        "met": {
            **{part: means[part] >= WANTED[part] for part in PARTS},
            "whole_system_cheapest_share": cheapest >= WANTED["whole_system_cheapest_share"],
        },
        "declared": {
            **sweeps.DECLARED,
            "limits": f"L(n) for n = {LIMITS[0]} to {LIMITS[-1]}; mean over those that both can hold",
            "headline": "waits included, start-up 10 s",
        },
    }  # fmt: skip


def _summary(draws: list[list[float]]) -> dict[str, Any]:
    means = [sum(draw) / len(draw) for draw in draws if draw]
    values = [value for draw in draws for value in draw]
    return {
        "more_percent": mean_interval(means),
        "most_percent": round(max(values), 3),
        "least_percent": round(min(values), 3),
    }


def rows(report_: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (what, paper, ours) for the terminal."""
    return [
        (
            f"{part}; {name}; {latency}",
            f"cost +{PAPER[part]['mean']:g} % (max +{PAPER[part]['max']:g} %)",
            f"cost {row['more_percent']['mean']:+.1f} % (max {row['most_percent']:+.1f} %)",
        )
        for latency in sweeps.LATENCIES
        for part, found in report_["ours"][latency].items()
        for name, row in found.items()
    ]

"""Figure 8: cost without migration and without autoscaling, at the same limit of the worst latency (7.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turboserve.experiments.paper import sweeps
from turboserve.experiments.paper.experiment import Scale
from turboserve.experiments.paper.metrics import above_percent, curve, mean_interval, ratio
from turboserve.experiments.paper.profiles import CLUSTER_OF, OLD_SIGNALS_S, SESSIONS, cluster
from turboserve.experiments.result_folder import PaperCell

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


@dataclass(frozen=True)
class Comparison:
    """The whole system and the system without a part at the same limits."""

    more_percent: list[float]
    """By how many percent it costs more without the part, at each limit that both can hold."""
    whole_only: int = 0
    """Limits that only the whole system can hold."""
    less_only: int = 0
    """Limits that only the system without the part can hold."""
    neither: int = 0


def compare(found: Mapping[str, Any], part: str, latency: str, limits_ms: list[float]) -> Comparison:
    """Compare costs at each limit that both can hold, and count the others."""
    whole, less = curve(found[OURS], latency), curve(found[part], latency)
    pairs = [(whole.at_latency(limit), less.at_latency(limit)) for limit in limits_ms]
    return Comparison(
        [above_percent(other.cost_worker_s, ours.cost_worker_s) for ours, other in pairs if ours and other],
        sum(ours is not None and other is None for ours, other in pairs),
        sum(ours is None and other is not None for ours, other in pairs),
        sum(ours is None and other is None for ours, other in pairs),
    )


def report(scale: Scale, results: Mapping[PaperCell, Any]) -> dict[str, Any]:
    fresh, old = sweeps.by_age(results)
    ours = _compared(fresh)
    summary = _summaries(ours)
    headline = summary[sweeps.HEADLINE]
    means = {part: _mean(rows_) for part, rows_ in headline.items()}
    missed = {
        part: sum(row["limits_without_a_match"]["less_only"] for row in rows_.values())
        for part, rows_ in headline.items()
    }
    values = [value for rows_ in ours[sweeps.HEADLINE].values() for draws in rows_.values() for draw in draws
              for value in draw.more_percent]  # fmt: skip
    cheapest = sum(value >= 0 for value in values) / len(values) if values else None
    return {
        "paper": PAPER,
        "ours": {
            **summary,
            "whole_system_cheapest_share": None if cheapest is None else round(cheapest, 4),
            sweeps.OLD: _summaries(_compared(old)),
        },
        "interval": {part: {name: row["more_percent"] for name, row in rows_.items()}
                     for part, rows_ in headline.items()},
        "ratio": {
            part: None if (mean := means[part]) is None else ratio(mean, PAPER[part]["mean"])
            for part in PARTS
        },
        "wanted": WANTED,
        "met": {
            **{part: _met(means[part], missed[part], WANTED[part]) for part in PARTS},
            "whole_system_cheapest_share": _met(
                cheapest, sum(missed.values()), WANTED["whole_system_cheapest_share"]
            ),
        },
        "declared": {
            **sweeps.DECLARED,
            "limits": f"L(n) for n = {LIMITS[0]} to {LIMITS[-1]}; mean over those that both can hold. "
            "`limits_without_a_match` counts the others. While there are limits that only the system without "
            "the part can hold, nothing is met.",
            "late": "Runs with late chunks count, for all systems: the limit is the only condition.",
            "headline": "waits included, start-up 10 s, signals without an age",
        },
    }  # fmt: skip


def _compared(results: Mapping[PaperCell, Any]) -> dict[str, Any]:
    """Return the comparisons by latency, part, and trace and size."""
    ours: dict[str, Any] = {latency: {part: {} for part in PARTS} for latency in sweeps.LATENCIES}
    for cell, found in results.items():
        name, size = cell.arguments[:2]
        latency_s = cluster(f"{CLUSTER_OF[name]} {size}").latency_s
        limits_ms = [1000 * latency_s[n] + 1e-3 for n in LIMITS]
        for latency, parts in ours.items():
            for part, row in parts.items():
                row.setdefault(f"{name}, {size}", []).append(compare(found, part, latency, limits_ms))
    return ours


def _summaries(ours: Mapping[str, Any]) -> dict[str, Any]:
    return {
        latency: {part: {name: _summary(draws) for name, draws in row.items()} for part, row in parts.items()}
        for latency, parts in ours.items()
    }


def _summary(draws: list[Comparison]) -> dict[str, Any]:
    """Return the interval over draws of each draw's mean, and the range. None: no limit in common."""
    means = [sum(draw.more_percent) / len(draw.more_percent) for draw in draws if draw.more_percent]
    values = [value for draw in draws for value in draw.more_percent]
    return {
        "more_percent": mean_interval(means) if means else None,
        "most_percent": round(max(values), 3) if values else None,
        "least_percent": round(min(values), 3) if values else None,
        "limits": len(LIMITS) * len(draws),
        "limits_without_a_match": {
            "whole_only": sum(draw.whole_only for draw in draws),
            "less_only": sum(draw.less_only for draw in draws),
            "neither": sum(draw.neither for draw in draws),
        },
    }


def _mean(rows_: Mapping[str, Any]) -> float | None:
    """Return the mean over traces and sizes of those that have one."""
    known = [row["more_percent"]["mean"] for row in rows_.values() if row["more_percent"] is not None]
    return sum(known) / len(known) if known else None


def _met(value: float | None, missed: int, limit: float) -> bool:
    """Return whether the mean is within the limit. `missed`: limits that only the other system can hold."""
    return value is not None and not missed and value >= limit


def rows(report_: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (what, paper, ours) for the terminal."""
    ours = report_["ours"]
    return [
        (
            f"{part}; {name}; {latency}{signals}",
            f"cost +{PAPER[part]['mean']:g} % (max +{PAPER[part]['max']:g} %)",
            _text(row),
        )
        for its, signals in ((ours, ""), (ours[sweeps.OLD], f"; signals {OLD_SIGNALS_S:g} s old"))
        for latency in sweeps.LATENCIES
        for part, found in its[latency].items()
        for name, row in found.items()
    ]


def _text(row: Mapping[str, Any]) -> str:
    without = sum(row["limits_without_a_match"].values())
    missing = f"{without} of {row['limits']} limits without a match"
    if row["more_percent"] is None:
        return missing
    text = f"cost {row['more_percent']['mean']:+.1f} % (max {row['most_percent']:+.1f} %)"
    return f"{text}, {missing}" if without else text

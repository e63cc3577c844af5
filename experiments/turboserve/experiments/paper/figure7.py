"""Figure 7: worst latency at matched cost, and cost at matched worst latency, against the baselines (7.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turboserve.experiments.paper import sweeps
from turboserve.experiments.paper.experiment import Scale
from turboserve.experiments.paper.metrics import (
    Curve,
    Setting,
    curve,
    mean_interval,
    ratio,
    reduction_percent,
)
from turboserve.experiments.paper.profiles import OLD_SIGNALS_S
from turboserve.experiments.paper.systems import BOUND
from turboserve.experiments.result_folder import PaperCell

NAME = "figure7"
BASELINES = ("base", "LAG", "MAG")
SCALED = tuple(f"{name} + autoscaling" for name in BASELINES)
OURS = "turboserve"
PAPER = {
    "latency_reduction_percent": {"mean": 37.5, "best": 51.6},
    "cost_reduction_percent": {"mean": 37.2, "best": 49.0},
    "1.3B, Trace 1, Cluster 2": {
        "latency_reduction_percent": {"base": 28.2, "LAG": 20.5, "MAG": 26.6},
        "cost_reduction_percent": {"base": 38.3, "LAG": 35.9, "MAG": 16.7},
    },
}
WANTED = {
    "latency_reduction_percent_to_base": 42.0,
    "cost_reduction_percent_to_base": 40.0,
    "share_of_perfect_elasticity_to_LAG": 0.65,
}
AS_PUBLISHED = "served_ms, late settings too"
"""As the paper measures (inferred): latencies of served chunks alone. Waits for a slot do not count, so
settings whose first chunks are late count, too."""
COMPARISONS = (*sweeps.LATENCIES, AS_PUBLISHED)
WHAT = ("latency_reduction_percent", "cost_reduction_percent", "share_of_perfect_elasticity")


def cells(scale: Scale) -> list[PaperCell]:
    return sweeps.cells(NAME, scale)


Values = dict[str, list[float | None]]
"""By comparison: a value for each setting of the baseline, None where there is no match."""


def compare(found: Mapping[str, Any], baseline: str, latency: str) -> Values:
    """Compare ours with every setting of a baseline, at equal cost and latency.

    `latency`: one of `COMPARISONS`. Settings with late chunks do not count, neither ours nor the baseline's,
    except with `AS_PUBLISHED`. None stands for a setting for which ours has no run that is as cheap, or as
    fast: there the baseline may be better. The share of perfect elasticity has waits included, because its
    cost is that of a pool where no session waits.
    """
    ours, bound = _curve(found[OURS], latency), _curve(found[BOUND], latency)
    values: Values = {what: [] for what in compared(latency)}
    for base in _curve(found[baseline], latency).settings:
        at_cost, at_latency = ours.at_cost(base.cost_worker_s), ours.at_latency(base.worst_ms)
        values[WHAT[0]].append(
            None if at_cost is None else reduction_percent(at_cost.worst_ms, base.worst_ms)
        )
        values[WHAT[1]].append(
            None if at_latency is None else reduction_percent(at_latency.cost_worker_s, base.cost_worker_s)
        )
        if WHAT[2] in values:
            values[WHAT[2]].append(_share(base, at_latency, bound.at_latency(base.worst_ms)))
    return values


def compared(latency: str) -> tuple[str, ...]:
    """Return what is compared for a kind of latency."""
    return WHAT if latency == "with_waits_ms" else WHAT[:2]


def _curve(runs: Sequence[Mapping[str, Any]], latency: str) -> Curve:
    return curve(runs, "served_ms") if latency == AS_PUBLISHED else curve(_in_time(runs), latency)


def _in_time(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [run for run in runs if not run["late"]]


def _share(base: Setting, ours: Setting | None, least: Setting | None) -> float | None:
    """Return what ours saves of what perfect elasticity saves; None if one of them has no such run."""
    if ours is None or least is None or least.cost_worker_s >= base.cost_worker_s:
        return None
    return (base.cost_worker_s - ours.cost_worker_s) / (base.cost_worker_s - least.cost_worker_s)


def report(scale: Scale, results: Mapping[PaperCell, Any]) -> dict[str, Any]:
    fresh, old = sweeps.by_age(results)
    summary, late = _compared(fresh)
    headline = summary[sweeps.HEADLINE]
    means = {baseline: _over(headline, baseline) for baseline in BASELINES}
    measured = {
        "latency_reduction_percent_to_base": ("base", WHAT[0]),
        "cost_reduction_percent_to_base": ("base", WHAT[1]),
        "share_of_perfect_elasticity_to_LAG": ("LAG", WHAT[2]),
    }
    whole = _whole(fresh)
    return {
        "paper": PAPER,
        "ours": {
            **summary,
            "mean_over_baselines": whole,
            "mean_over_baselines_as_published": _whole(fresh, AS_PUBLISHED),
            "settings_with_late_chunks": late,
            sweeps.OLD: {
                **_compared(old)[0],
                "mean_over_baselines": _whole(old),
                "mean_over_baselines_as_published": _whole(old, AS_PUBLISHED),
            },
        },
        "interval": {**whole, **{name: row["base"] for name, row in headline.items()}},
        "ratio": {
            what: None if value is None else ratio(value["mean"], PAPER[what]["mean"])  # type: ignore[index]
            for what, value in whole.items()
        },
        "wanted": WANTED,
        "met": {
            name: _met(headline, *measured[name], means[measured[name][0]][measured[name][1]], limit)
            for name, limit in WANTED.items()
        },
        "declared": {
            **sweeps.DECLARED,
            "matched": "Mean over the baseline's settings. For each, of our settings the fastest that costs "
            "no more, and the cheapest that is no slower. Settings with late chunks do not count on either "
            f"side, except with `{AS_PUBLISHED}`. A setting for which ours has no such run is not in the "
            "mean. `without_match` counts them. A mean that lacks settings meets nothing.",
            "headline": "waits included, start-up 10 s, signals without an age",
        },
    }


def _compared(results: Mapping[PaperCell, Any]) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """Return the summary by latency, trace and baseline, and the numbers of settings with late chunks."""
    ours: dict[str, Any] = {latency: {} for latency in COMPARISONS}
    late: dict[str, dict[str, int]] = {}
    for cell, found in results.items():
        name, size = cell.arguments[:2]
        counts = late.setdefault(f"{name}, {size}", dict.fromkeys((OURS, *BASELINES, *SCALED), 0))
        for system in counts:
            counts[system] += len(found[system]) - len(_in_time(found[system]))
        for latency in COMPARISONS:
            for baseline in (*BASELINES, *SCALED):
                row = ours[latency].setdefault(f"{name}, {size}", {})
                row.setdefault(baseline, []).append(compare(found, baseline, latency))
    summary = {
        latency: {
            name: {baseline: _summary(draws) for baseline, draws in row.items()}
            for name, row in rows_.items()
        }
        for latency, rows_ in ours.items()
    }
    return summary, late


def _whole(
    results: Mapping[PaperCell, Any], latency: str = sweeps.HEADLINE
) -> dict[str, dict[str, Any] | None]:
    """Return the means over traces, sizes and baselines, with their interval over draws."""
    draws: dict[str, dict[int, list[float]]] = {what: {} for what in WHAT[:2]}
    for cell, found in results.items():
        for baseline in BASELINES:
            values = compare(found, baseline, latency)
            for what, by_seed in draws.items():
                if (value := _mean(values[what])) is not None:
                    by_seed.setdefault(cell.arguments[2], []).append(value)
    return {
        what: mean_interval([sum(each) / len(each) for each in by_seed.values()]) if by_seed else None
        for what, by_seed in draws.items()
    }


def _summary(draws: Sequence[Values]) -> dict[str, Any]:
    """Return the interval over draws of each draw's mean, the best setting of all, and what has no match."""
    found: dict[str, Any] = {}
    without: dict[str, int] = {}
    for what in draws[0]:
        known = [[value for value in draw[what] if value is not None] for draw in draws]
        without[what] = sum(len(draw[what]) for draw in draws) - sum(map(len, known))
        means = [sum(values) / len(values) for values in known if values]
        best = max((value for values in known for value in values), default=None)
        least = min((value for values in known for value in values), default=None)
        found[what] = (
            {**mean_interval(means), "best_setting": best, "worst_setting": least} if means else None
        )
    return {**found, "settings": sum(len(draw[WHAT[0]]) for draw in draws), "without_match": without}


def _met(rows_: Mapping[str, Any], baseline: str, what: str, value: float | None, limit: float) -> bool:
    """Return whether the mean is within the limit. A mean that lacks settings meets nothing."""
    missing = any(row[baseline]["without_match"][what] for row in rows_.values())
    return value is not None and not missing and value >= limit


def _over(rows_: Mapping[str, Any], baseline: str) -> dict[str, float | None]:
    return {
        what: _mean([row[baseline][what] and row[baseline][what]["mean"] for row in rows_.values()])
        for what in WHAT
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 4) if known else None


def rows(report_: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (what, paper, ours) for the terminal."""
    ours = report_["ours"]
    return [*_rows(ours, ""), *_rows(ours[sweeps.OLD], f"; signals {OLD_SIGNALS_S:g} s old")]


def _rows(ours: Mapping[str, Any], signals: str) -> list[tuple[str, str, str]]:
    shown = []
    for latency in COMPARISONS:
        for name, row in ours[latency].items():
            for baseline, found in row.items():
                texts = []
                for what, label in zip(WHAT, ("latency", "cost"), strict=False):
                    value = found[what]
                    texts.append(f"{label} none" if value is None else f"{label} {-value['mean']:+.1f} %")
                    if missing := found["without_match"][what]:
                        texts[-1] += f" ({missing} of {found['settings']} settings without a match)"
                share = found.get(WHAT[2])
                if share is not None:
                    texts.append(f"{share['mean']:.0%} of perfect elasticity")
                paper = "latency −37.5 %, cost −37.2 %" if baseline in BASELINES else "not given"
                shown.append((f"to {baseline}; {name}; {latency}{signals}", paper, ", ".join(texts)))
    return shown

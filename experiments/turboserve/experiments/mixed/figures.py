"""Figures over matrices: medians, worst cases, paired gains, and their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

DRAWS = 2000
"""Draws of the bootstrap."""


def median_interval(values: Sequence[float]) -> list[float]:
    """Return the 95 % interval of the median, by a bootstrap over `values` with a fixed seed."""
    source = np.random.default_rng(0)
    drawn = source.choice(np.asarray(values, float), size=(DRAWS, len(values)))
    return [float(one) for one in np.quantile(np.median(drawn, axis=1), (0.025, 0.975))]


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, its interval, and the least value."""
    return {
        "median": float(np.median(values)),
        "ci95": median_interval(values),
        "worst": float(min(values)),
    }


def medians(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median by policy. `found`: one value for each matrix."""
    return {name: float(np.median(values)) for name, values in found.items()}


def gains(found: Mapping[str, Sequence[float]], name: str) -> dict[str, dict[str, Any]]:
    """Return how much more a policy carries than each other one: ratios of the same matrix and sessions."""
    return {
        other: summary([ours / max(its, 1.0) for ours, its in zip(found[name], values, strict=True)])
        for other, values in found.items()
        if other != name
    }


def compared(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Return the figures of one trace of mixes that change, by mode. `runs`: for each seed, in order."""
    found: dict[str, Any] = {}
    for mode, own in runs.items():
        figures: dict[str, Any] = {name: summary([one[name] for one in own]) for name in own[0]}
        figures["without_place"] = max(one["without_place"] for one in own)
        figures["cost_of_none"] = summary(
            [one["cost"] / none["cost"] for one, none in zip(own, runs["none"], strict=True)]
        )
        found[mode] = figures
    return found

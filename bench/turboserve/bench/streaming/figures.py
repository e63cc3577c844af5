"""Summaries of measured values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` of `values` lie, interpolated; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summary(values: Iterable[float], *, largest: bool = False) -> dict[str, float | None]:
    """`{p50, p95}`, with `max` on request, rounded to a tenth of a millisecond."""
    kept = list(values)
    figures = {"p50": percentile(kept, 0.50), "p95": percentile(kept, 0.95)}
    if largest:
        figures["max"] = max(kept, default=None)
    return {name: None if value is None else round(value, 4) for name, value in figures.items()}

"""Summaries of measured values."""

from __future__ import annotations

from collections.abc import Iterable

from turboserve.bench.report import percentile


def summary(values: Iterable[float], *, largest: bool = False) -> dict[str, float | None]:
    """Return `{p50, p95}`, and `max` on request, rounded to a hundredth of a millisecond."""
    kept = list(values)
    figures = {"p50": percentile(kept, 0.50), "p95": percentile(kept, 0.95)}
    if largest:
        figures["max"] = max(kept, default=None)
    return {name: None if value is None else round(value, 5) + 0.0 for name, value in figures.items()}

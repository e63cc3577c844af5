"""Percentiles of values that have weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value", int, float)


def percentile_of(weights: Mapping[Value, float], part: float) -> Value:
    """Return the least value that is not exceeded by this part of all weights. `part`: above 0, up to 1."""
    left = part * sum(weights.values())
    for value in sorted(weights):
        left -= weights[value]
        if left <= 0:
            return value
    raise ValueError("weights: there are none")

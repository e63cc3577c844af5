"""The highest load that a policy carries."""

from __future__ import annotations

from collections.abc import Callable

LEAST_RATE, MOST_RATE = 0.4, 2.8
STEPS = 5
"""Halvings of the interval: the result is exact to (2.8 − 0.4) / 2⁵ = 0.075."""


def highest_rate(
    carries: Callable[[float], bool],
    least: float = LEAST_RATE,
    most: float = MOST_RATE,
    steps: int = STEPS,
) -> float | None:
    """Return the highest rate for which `carries` is true, by bisection; None if the least is too much.

    `carries` is true below some rate and false above. The result is at most (most − least) / 2^steps too low.
    """
    if not carries(least):
        return None
    if carries(most):
        return most
    low, high = least, most
    for _ in range(steps):
        middle = (low + high) / 2
        if carries(middle):
            low = middle
        else:
            high = middle
    return low

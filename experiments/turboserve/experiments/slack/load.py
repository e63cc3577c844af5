"""The highest load that a policy carries, by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from turboserve.experiments.slack.cells import Cell, CprBounds

LEAST_RATE, MOST_RATE = 0.4, 3.6
"""Rates between which the highest load is looked for. A device that makes a chunk in 0.4 s at its floor is
full at 3.0."""
STEPS, QUICK_STEPS = 6, 5
"""Halvings of the interval: the result is exact to (3.6 − 0.4) / 2⁶ = 0.05."""


def highest_rate(
    carries: Callable[[float], bool],
    least: float = LEAST_RATE,
    most: float = MOST_RATE,
    steps: int = STEPS,
) -> float | None:
    """Return the highest rate for which `carries` is true, by bisection; None if the least is too much.

    `carries` is true below some rate and false above. The result is at most (most − least) / 2^steps too low.
    An end of the interval is tried only if all rates between the ends have the same answer.
    """
    low, high = least, most
    for _ in range(steps):
        middle = (low + high) / 2
        if carries(middle):
            low = middle
        else:
            high = middle
    if low == least and not carries(least):
        return None
    return most if high == most and carries(most) else low


@dataclass(frozen=True)
class LoadSearch:
    """Looks for the highest rate at which the mean CPR over the seeds reaches a number."""

    bounds: Callable[[Cell, float, float], CprBounds]
    """Runs a cell until its CPR is certainly below the first number or at least the second, or to its end."""
    seeds: Sequence[int]
    wanted: float
    steps: int

    def highest(self, cell: Cell) -> float | None:
        """Return the rate. The seeds of `cell` do not count, nor does its rate."""
        return highest_rate(lambda rate: self.reaches(replace(cell, rate=rate)), steps=self.steps)

    def reaches(self, cell: Cell) -> bool:
        """Return whether the mean CPR over the seeds is at least the wanted one.

        A run ends as soon as the answer is certain, whatever comes of the rest of its chunks and of the seeds
        that have not run. So an early end changes no answer.
        """
        count, sum_ = len(self.seeds), 0.0
        for number, seed in enumerate(self.seeds, 1):
            lacking = self.wanted * count - sum_
            left = count - number
            found = self.bounds(replace(cell, seed=seed), lacking - left, math.inf if left else lacking)
            if found.most < lacking - left:
                return False
            if not left:
                return found.least >= lacking
            sum_ += found.least
        return False


def load_ratios(found: dict[str, float | None]) -> dict[str, float | None]:
    """Return the load of `ours` over those of others. None: one of the two carries no load."""
    ours = found.get("ours")

    def over(*names: str) -> float | None:
        others = [rate for name in names if (rate := found.get(name)) is not None]
        return None if ours is None or not others else ours / max(others)

    return {"static": over("sdv2", "ts", "ts_chunk"), "slackserve": over("slackserve")}

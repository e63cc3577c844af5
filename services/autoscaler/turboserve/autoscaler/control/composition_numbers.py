"""Numbers of workers of each offer, and what they cost: what a composition's search works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WHOLE = 1e-6
"""A value this near to a whole number is one."""


@dataclass(frozen=True)
class WorkerCosts:
    """Costs and limits of the workers. Lists are in the order of offers, or of kinds."""

    kinds: Sequence[int]
    """The place of each offer's kind."""
    price: Sequence[float]
    """Of each worker of an offer."""
    new: Sequence[float]
    """Of each worker of an offer beyond the present ones, in addition."""
    hired: Sequence[float]
    """Of each worker of a kind beyond the present ones, in addition."""
    present: Sequence[float]
    """Workers of each offer."""
    lower: Sequence[float]
    upper: Sequence[float]
    """Fewest and most workers of each offer."""
    most: Sequence[float]
    """Most workers of each kind."""
    total: int | None
    """Number of all workers. None: any."""


@dataclass(frozen=True)
class Numbers:
    """The optimum for some limits of the numbers, and a bound of what sessions without a place cost."""

    counts: Sequence[float]
    """Workers of each offer."""
    cost: float
    missing: Sequence[float]
    """Sessions of each class without a place."""
    at_zero: float
    slopes: Sequence[float]
    """For any numbers of workers, sessions without a place cost at least `at_zero` and the slopes times the
    numbers. Both are 0 if the optimum has no such bound."""

    @property
    def fractions(self) -> list[tuple[int, float]]:
        """Places and values of the numbers that are not whole."""
        return [
            (place, count) for place, count in enumerate(self.counts) if abs(count - round(count)) > WHOLE
        ]

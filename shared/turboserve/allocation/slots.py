"""Slots of a worker that serves several classes, counted in sessions of one of them.

A worker serves n_j sessions of class j alone. A session of class j is then 1 / n_j of the worker, and takes
n_c / n_j slots of class c. All sums are exact. With one class, slots are numbers of sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil


def slots_used(served: Mapping[str, int], one: str, counts: Mapping[str, int]) -> int:
    """Return how many slots of the class `one` these sessions use: n_c Σ x_j / n_j, rounded up.

    `served`: n_j by class. `counts`: x_j by class. So another session of the class fits, Σ x_j / n_j ≤ 1 with
    it, if and only if the result is below n_c. A session of a class that the worker does not serve takes one
    slot. One of a class with n_j = 0 takes all slots: the worker reports n_j without the sessions that are
    paused in their slabs, and one of these has been resumed.
    """
    whole = counts.get(one, 0)
    if len(counts) == (one in counts):
        return whole
    others = sum(
        (count * _slots_of(served, one, other) for other, count in counts.items() if other != one),
        Fraction(0),
    )
    return whole + ceil(others)


def _slots_of(served: Mapping[str, int], one: str, other: str) -> Fraction:
    if other not in served:
        return Fraction(1)
    return Fraction(served.get(one, 0), served[other] or 1)

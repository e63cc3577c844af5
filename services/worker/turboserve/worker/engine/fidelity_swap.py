"""The exchange of several chunks' configurations at once. Pure arithmetic.

The exchange before it takes whole steps of the ladder's hull, in the order of the deadlines. So it may leave
time unused that a better chunk here and a worse one there would use, or a configuration beside the hull.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import combinations

import numpy as np

from turboserve.worker.engine.fidelity_forecast import LATE_S, Floats, Ints

SWAPS = 4
"""Largest number of swaps of a plan."""
SWAP_SIZES = {2: 96, 3: 24, 4: 18}
"""Number of chunks that a swap changes → largest number of places, over all chunks, to which one can move."""
LEAST_GAIN = 1e-9
"""Least quality that a swap gains: rounding."""


def best_swap(
    places: Ints, highest: Ints, lowest: Ints, qualities: Sequence[float], late_s: Callable[[Ints], Floats]
) -> Ints | None:
    """Return the plan after the swap that gains the most and makes the plan no later. None: there is none.

    Swaps of fewer chunks come first.

    Args:
        places: Place of each chunk's configuration on the ladder.
        highest: Highest place that each chunk may get.
        lowest: Lowest place that each chunk may get.
        qualities: Quality by place.
        late_s: Plans, one a row → lateness of each, seconds.
    """
    quality = np.array(qualities)
    ends = zip(highest.tolist(), lowest.tolist(), places.tolist(), strict=True)
    changes = [(i, p) for i, (high, low, now) in enumerate(ends) for p in range(high, low + 1) if p != now]
    chunks, to = np.array(changes, dtype=np.int64).reshape(-1, 2).T
    gains = quality[to] - quality[places[chunks]]
    before_s = late_s(places)
    for size, most in SWAP_SIZES.items():
        if not size <= len(changes) <= most:
            continue
        choices = _combinations(len(changes), size)
        changed, gain = chunks[choices], gains[choices[:, 0]]
        for column in range(1, size):
            gain = gain + gains[choices[:, column]]
        useful = np.flatnonzero((gain > LEAST_GAIN) & (changed[:, 1:] != changed[:, :-1]).all(axis=1))
        useful = useful[np.argsort(-gain[useful], kind="stable")]
        plans = np.repeat(places[None, :], len(useful), axis=0)
        np.put_along_axis(plans, changed[useful], to[choices[useful]], axis=1)
        good = np.flatnonzero(late_s(plans) <= before_s + LATE_S)
        if len(good):
            best: Ints = plans[good[0]]
            return best
    return None


@lru_cache(maxsize=256)
def _combinations(count: int, size: int) -> Ints:
    """All choices of `size` of so many numbers, one a row."""
    return np.array(list(combinations(range(count), size)), dtype=np.int64)

"""Burst absorption: what the pool's size may save because workers can lower quality for a moment.

A worker holds K sessions at full fidelity, and up to K_floor if chunks are lowered to the floor's
configuration. So headroom for a burst need not be idle workers: while new workers start, the floor carries
the burst. *Quality debt* is the share of the last minute's chunks that the load has lowered, *deficit*
the expected number of late chunks.
"""

from __future__ import annotations

from turboserve.contracts.autoscale import LevelParameters
from turboserve.contracts.pool import LoadFeedback
from turboserve.wording import counted

DEBT_WINDOW_S = 60.0
"""Time over which workers report quality debt."""
LEARNS_S = 600.0
"""Time after which no quality debt at all has moved the price from 1 to 0, seconds."""
PEAK_SHARE = 0.5
"""Share of K_floor − K that a scale-in counts on for the return of the last peak. 1 costs as much on the
profiled traces, with more quality debt on the bursty ones."""
LATE_CHUNKS = 1.0
"""Deficit from which on the pool grows. It shrinks only without any: the difference is the hysteresis."""
LONGEST_GAP_S = 10.0
"""Longest time for which one feedback counts, seconds: after that it is stale."""


class QualityPrice:
    """How much of the table's headroom the pool buys although the floor would carry a burst: 0 to 1.

    The price begins at 0 and rises while quality debt is above the limit. It falls while debt is below,
    in proportion to the difference. So in the long run the mean debt comes near the limit, unless even a
    price of 0 or 1 does not reach it. Reacting to one burst would be too late: its debt is over when the
    bought workers come.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.value = 0.0
        self._above_since: float | None = None
        self._last: tuple[float, float] | None = None
        """Time and quality debt of the last feedback."""

    def observe(self, debt: float, now: float) -> None:
        """Note the quality debt of a feedback, a share, at monotonic time `now`."""
        if self._limit <= 0:
            return
        if self._last is not None:
            at, before = self._last
            elapsed_s = min(max(now - at, 0.0), LONGEST_GAP_S)
            step = elapsed_s / LEARNS_S * (before / self._limit - 1.0)
            self.value = min(max(self.value + step, 0.0), 1.0)
        self._last = now, debt
        if debt <= self._limit:
            self._above_since = None
        elif self._above_since is None:
            self._above_since = now

    def exceeded_s(self, now: float) -> float:
        """Return for how long the quality debt has been above the limit without a break, seconds."""
        return 0.0 if self._above_since is None else max(now - self._above_since, 0.0)


def floor_of(feedback: LoadFeedback, capacity: int) -> int:
    """Return K_floor per worker, at least K (`capacity`). Without a report, K."""
    if feedback.floor_capacity is None or feedback.workers == 0:
        return capacity
    return max(feedback.floor_capacity // feedback.workers, capacity)


def priced(row: LevelParameters, capacity: int, floor: int, price: float) -> LevelParameters:
    """Return the parameters in force while workers absorb bursts.

    The table's ρ̂ leaves 1 − ρ̂ of all slots free. With absorption, slots count at the floor: at price 0,
    ρ = min(ρ̂ K_floor / K, 1), which needs ⌈N_req / (K_floor ρ̂)⌉ workers, and never fewer than ⌈N_req / K⌉.
    At price 1, ρ = ρ̂.
    """
    own = row.target_utilization
    relaxed = max(min(own * floor / capacity, 1.0), own)
    if relaxed == own:
        return row
    return row.model_copy(update={"target_utilization": relaxed - (relaxed - own) * price})


def peak_slots(capacity: int, floor: int, price: float) -> float:
    """Return the sessions per worker for which a scale-in keeps room when the last peak returns.

    At price 1 every session would have a slot. At price 0 the peak would take half of what the floor adds,
    and the other half is left for a peak that is higher.
    """
    return capacity + PEAK_SHARE * (max(floor, capacity) - capacity) * (1.0 - price)


def owed(feedback: LoadFeedback) -> str:
    """Return what keeps the pool from shrinking; empty without quality debt, deficit and loans."""
    if feedback.deficit > 0:
        return f"{feedback.deficit:.1f} late chunks are expected"
    if feedback.quality_debt > 0:
        return f"{feedback.quality_debt:.1%} of the last minute's chunks are lowered by load"
    if feedback.borrowing > 0:
        return f"{counted(feedback.borrowing, 'worker')} must borrow the device of another one"
    return ""

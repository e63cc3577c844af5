"""Statistics of the traces in TurboServe's Tables 11 and 12, and the comparison of a trace with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from turboserve.autoscaler.control.events import SessionChange
from turboserve.contracts.errors import InvalidInputError
from turboserve.experiments.autoscale.trace import WorkloadTrace

TOLERANCE = 0.03
"""Largest relative difference of a drawn trace from the published statistics."""


@dataclass(frozen=True)
class Window:
    """One column of the table."""

    arrivals: int
    departures: int
    active: float
    """Mean active sessions."""


@dataclass(frozen=True)
class TraceStatistics:
    """Published statistics of one trace. The length of its windows is lost, so it is inferred."""

    windows: tuple[Window, ...]
    window_s: float = 300.0
    """T1 to T6: means are multiples of 0.2, so five samples, one a minute (inferred). M: 90 s, because eight
    H100 at 3.99 $ an hour cost its 3.99 $ in 7.5 minutes (inferred)."""
    present: int = 0
    """Sessions at time 0, which are no arrivals. The paper does not give it. M's first mean, 10.36, exceeds
    half of 31 arrivals less 17 departures, so sessions were there: with 8, the same share of the sessions is
    active in its first two windows (inferred)."""

    @property
    def ends_s(self) -> float:
        return self.window_s * len(self.windows)

    def by_window(self, window_s: float) -> TraceStatistics:
        """Return the same counts and means with windows of another length."""
        return replace(self, window_s=window_s)


def _statistics(
    rows: Sequence[tuple[int, int, float]], window_s: float = 300.0, present: int = 0
) -> TraceStatistics:
    return TraceStatistics(tuple(Window(*row) for row in rows), window_s, present)


PUBLISHED: Mapping[str, TraceStatistics] = {
    "M": _statistics(
        [(31, 17, 10.36), (47, 24, 20.91), (30, 26, 19.30), (48, 39, 29.62), (44, 49, 33.49)],
        window_s=90.0,
        present=8,
    ),
    "T1": _statistics([(122, 44, 28.0), (130, 86, 56.2), (66, 88, 57.4), (22, 64, 37.4), (18, 38, 23.2)]),
    "T2": _statistics(
        [(218, 60, 61.0), (214, 124, 118.6), (248, 204, 147.6), (192, 196, 154.2), (204, 204, 149.4)]
    ),
    "T3": _statistics(
        [(74, 10, 13.2), (148, 64, 49.4), (156, 126, 112.8), (264, 148, 121.4), (156, 214, 148.4)]
    ),
    "T4": _statistics(
        [(500, 158, 118.4), (428, 266, 219.2), (308, 388, 268.0), (88, 236, 162.8), (80, 152, 101.8)]
    ),
    "T5": _statistics(
        [(874, 238, 245.8), (862, 504, 475.2), (998, 810, 589.2), (762, 784, 616.8), (814, 814, 598.4)]
    ),
    "T6": _statistics(
        [(296, 36, 54.4), (590, 260, 198.4), (626, 502, 451.4), (1062, 608, 487.2), (618, 846, 592.0)]
    ),
}
"""Table 11 (M) and Table 12 (T1 to T6). T1 to T3 ran on 16 GPUs, T4 to T6 on 64."""


def published(name: str, window_s: float | None = None) -> TraceStatistics:
    """Return the statistics of a trace. Raises InvalidInputError for an unknown name or a bad length."""
    found = PUBLISHED.get(name)
    if found is None:
        known = ", ".join(PUBLISHED)
        raise InvalidInputError(f"unknown trace {name!r}; known: {known}", field="trace", limit=known)
    if window_s is None:
        return found
    if not LEAST_WINDOW_S <= window_s <= MOST_WINDOW_S:
        detail = f"windows of {window_s:g} s are not within {LEAST_WINDOW_S:g} to {MOST_WINDOW_S:g} s"
        limit = LEAST_WINDOW_S if window_s < LEAST_WINDOW_S else MOST_WINDOW_S
        raise InvalidInputError(detail, field="window_s", limit=limit)
    return found.by_window(window_s)


LEAST_WINDOW_S, MOST_WINDOW_S = 30.0, 3600.0
LEAST_S = 1e-9


@dataclass(frozen=True)
class Difference:
    """One published number, and the same of a trace."""

    window: int
    """From 1."""
    statistic: str
    published: float
    found: float

    @property
    def share(self) -> float:
        """Difference relative to the published number."""
        return self.found / self.published - 1.0

    @property
    def within(self) -> bool:
        return abs(self.share) <= TOLERANCE


def differences(trace: WorkloadTrace, statistics: TraceStatistics) -> list[Difference]:
    """Compare a trace with the statistics, window by window. Sessions present at time 0 are no arrivals.

    Raises InvalidInputError if the trace does not end with the last window.
    """
    if abs(trace.ends_s - statistics.ends_s) > 1.0:
        detail = f"{trace.name} ends at {trace.ends_s:g} s, and the windows at {statistics.ends_s:g} s"
        raise InvalidInputError(detail, field="ends_s", limit=statistics.ends_s)
    means = active_means(trace, statistics)
    found: list[Difference] = []
    for index, (window, mean) in enumerate(zip(statistics.windows, means, strict=True)):
        begins_s = statistics.window_s * index
        # Sessions that are there at time 0 came before the first window.
        span = (max(begins_s, LEAST_S), begins_s + statistics.window_s)
        arrivals, departures = (
            trace.count(kind, *span) for kind in (SessionChange.ARRIVAL, SessionChange.DEPARTURE)
        )
        found += [
            Difference(index + 1, "arrivals", window.arrivals, arrivals),
            Difference(index + 1, "departures", window.departures, departures),
            Difference(index + 1, "mean active", window.active, mean),
        ]
    return found


def active_means(trace: WorkloadTrace, statistics: TraceStatistics) -> list[float]:
    """Return the mean active sessions by window, sampled every second."""
    counts = trace.active()
    bounds = [round(statistics.window_s * index) for index in range(len(statistics.windows) + 1)]
    return [sum(counts[begin:end]) / (end - begin) for begin, end in pairwise(bounds)]

"""The workloads of TurboServe's Appendix A: the profiled family, and the ten unseen windows."""

from __future__ import annotations

import random
from collections.abc import Sequence

from turboserve.autoscaler.control.events import SessionChange
from turboserve.experiments.autoscale.shapes import from_counts, plateau, ramp
from turboserve.experiments.autoscale.trace import Step, WorkloadTrace, checked

BURSTS = tuple(range(7, 44, 4))
"""Table 5: arrivals of the ten segments."""
BASE_ACTIVE = 16
"""Table 5: peak active sessions minus arrivals, the same in all ten segments."""
SEGMENT_S = 60
"""Length of a segment, derived from the cost of level 1: 338.66 at five to six workers."""
BURST_S = 2
"""Time over which a burst is spread.

It gives about the volatility of Table 5 in the detector's window of 30 epochs of 1 s: 0.88 at 7 arrivals and
5.4 at 43. The table has 0.86 and 6.38.
"""
CALM = (16, 32, 48)
"""Concurrent sessions in the calm segments. Table 5 has none: it begins at a burst of 7."""
CALM_S = 300
STAY_S = 150.0
"""Mean stay: Little's law on Table 12 gives 2 to 4 minutes."""
WINDOWS = (
    (960, 38), (515, 18), (230, 8), (704, 28), (1537, 58),
    (2173, 77), (373, 13), (1707, 68), (669, 23), (1595, 73),
)  # fmt: skip
"""Table 7: the sum over 30 samples of one second each (mean × 30), and the maximum."""
WINDOW_S = 30
FIRST_ACTIVE = 20
"""Active sessions before the first window, which rises to 38 with a mean of 32.

The paper does not give it.
"""


def segment(burst: int, seed: int) -> WorkloadTrace:
    """Build one segment of Table 5: `BASE_ACTIVE` sessions, and a burst of more at a random instant."""
    source = random.Random(f"segment {seed}")
    at = source.randrange(15, 30)
    counts = [
        BASE_ACTIVE + round(burst * min(max((second + 1 - at) / BURST_S, 0.0), 1.0))
        for second in range(SEGMENT_S)
    ]
    return from_counts(f"burst {burst}.{seed}", counts, source.randrange(1 << 30))


def calm(sessions: int, seed: int) -> WorkloadTrace:
    """Build a calm trace of about `sessions` at once: Poisson arrivals and exponential stays."""
    source = random.Random(f"calm {sessions} {seed}")
    steps = [Step(0.0, f"s{number:05d}", SessionChange.ARRIVAL) for number in range(sessions)]
    at, leaves = 0.0, [(source.expovariate(1 / STAY_S), step.session) for step in steps]
    while (at := at + source.expovariate(sessions / STAY_S)) < CALM_S:
        steps.append(Step(at, f"s{len(steps):05d}", SessionChange.ARRIVAL))
        leaves.append((at + source.expovariate(1 / STAY_S), steps[-1].session))
    steps += [Step(at, session, SessionChange.DEPARTURE) for at, session in leaves if at < CALM_S]
    steps.sort(key=lambda step: (step.at, step.session))
    return checked(f"calm {sessions}.{seed}", steps, CALM_S)


def ten_windows(
    windows: Sequence[tuple[int, int]] = WINDOWS, first: int = FIRST_ACTIVE, name: str = "ten windows",
    seed: int = 7,
) -> WorkloadTrace:  # fmt: skip
    """Build windows of 30 s with exactly these sums and maxima of active sessions, sampled every second.

    A rising window rises in a straight line from the end of the previous window, for as long as its mean
    implies (12 to 15 s in most), and stays at its maximum. A falling window falls in its first second.
    """
    counts: list[int] = []
    level = first
    for total, top in windows:
        if top > level:
            counts += ramp(level, top, total, WINDOW_S)
        else:
            counts += plateau(top, total, WINDOW_S)
        level = counts[-1]
    return from_counts(name, counts, seed)


def other_windows(seed: int) -> WorkloadTrace:
    """Draw ten windows that alternate between low, medium and high pressure, as those of Table 7."""
    source = random.Random(f"windows {seed}")
    bands = {"low": (8, 24), "medium": (25, 50), "high": (55, 77)}
    windows: list[tuple[int, int]] = []
    level, kind = FIRST_ACTIVE, "low"
    for _ in range(10):
        kind = source.choice([other for other in bands if other != kind])
        top = source.randint(*bands[kind])
        length = source.uniform(11.0, 16.0)
        mean = top - (top - level) * length / 2 / WINDOW_S if top > level else top - source.random()
        windows.append((round(mean * WINDOW_S), top))
        level = top
    return ten_windows(windows, name=f"other windows {seed}", seed=seed)

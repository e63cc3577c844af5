"""The workloads of TurboServe's Appendix A: the family that is profiled, the unseen ten windows."""

from __future__ import annotations

import random
from collections.abc import Sequence

from turboserve.autoscaler.control.events import SessionChange
from turboserve.bench.autoscale.shapes import from_counts, plateau, ramp
from turboserve.bench.autoscale.trace import Step, WorkloadTrace, checked

BURSTS = tuple(range(7, 44, 4))
"""Table 5: arrivals of the ten segments."""
BASE_ACTIVE = 16
"""Table 5: peak active less arrivals, the same in all ten."""
SEGMENT_S = 60
"""Length of a segment: 338.66 (level 1) at five to six workers."""
BURST_S = 2
"""A burst spread over so long has about the volatility of Table 5 (0.88 at 7 arrivals, 5.4 at 43; given are
0.86 and 6.38) in the detector's window of 30 epochs of 1 s."""
CALM = (16, 32, 48)
"""Sessions at once in the calm segments, which Table 5 does not have: it begins at a burst of 7."""
CALM_S = 300
STAY_S = 150.0
"""Mean stay: Little's law on Table 12 gives 2 to 4 minutes."""
WINDOWS = (
    (960, 38), (515, 18), (230, 8), (704, 28), (1537, 58),
    (2173, 77), (373, 13), (1707, 68), (669, 23), (1595, 73),
)  # fmt: skip
"""Table 7: sum over 30 samples of a second (mean × 30), and maximum."""
WINDOW_S = 30
FIRST_ACTIVE = 20
"""Active before the first window, which rises to 38 with a mean of 32: not given."""


def segment(burst: int, seed: int) -> WorkloadTrace:
    """One segment of Table 5: `BASE_ACTIVE` sessions, and at a random instant a burst of more."""
    source = random.Random(f"segment {seed}")
    at = source.randrange(15, 30)
    counts = [
        BASE_ACTIVE + round(burst * min(max((second + 1 - at) / BURST_S, 0.0), 1.0))
        for second in range(SEGMENT_S)
    ]
    return from_counts(f"burst {burst}.{seed}", counts, source.randrange(1 << 30))


def calm(sessions: int, seed: int) -> WorkloadTrace:
    """Sessions come by themselves (Poisson) and stay as they like (exponential): about `sessions` at once."""
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
    """Windows of 30 s with exactly these sums and maxima of active sessions, sampled every second.

    A window that rises does so in a straight line from where the one before ended, as long as its mean says
    (12 to 15 s in most), and stays at its maximum; one that falls does so in its first second.
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
    """Ten windows that alternate between low, medium and high pressure as Table 7's do, drawn at random."""
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

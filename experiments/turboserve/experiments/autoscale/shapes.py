"""Builds traces of arrivals and departures from the number of active sessions per second."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from turboserve.autoscaler.control.events import SessionChange
from turboserve.experiments.autoscale.trace import Step, WorkloadTrace, checked


def from_counts(name: str, counts: Sequence[int], seed: int) -> WorkloadTrace:
    """Build a trace in which `counts[i]` sessions are active at second i.

    Within a second, changes come at random instants just before it; those of second 0 come at 0. The
    departing session is drawn at random, so the workers become unequal.
    """
    source = random.Random(seed)
    steps: list[Step] = []
    active: list[str] = []
    created = 0
    for second, count in enumerate(counts):
        by = count - len(active)
        times = sorted(max(second - source.random(), 0.0) for _ in range(abs(by)))
        for at in times:
            if by > 0:
                name_of = f"s{created:05d}"
                created += 1
                active.append(name_of)
                steps.append(Step(at, name_of, SessionChange.ARRIVAL))
            else:
                leaver = active.pop(source.randrange(len(active)))
                steps.append(Step(at, leaver, SessionChange.DEPARTURE))
    return checked(name, steps, float(len(counts)))


def ramp(start: int, top: int, total: int, seconds: int) -> list[int]:
    """Return `seconds` counts that rise linearly from `start` to `top`, stay there, and sum to `total`.

    The length of the line follows from the sum. Rounding errors are corrected by ones, never above `top`.
    """
    best: list[int] = []
    for tenths in range(1, 10 * seconds + 1):
        length = tenths / 10
        counts = [round(start + (top - start) * min((second + 1) / length, 1.0)) for second in range(seconds)]
        if not best or abs(sum(counts) - total) < abs(sum(best) - total):
            best = counts
    return _mend(best, top, total)


def plateau(top: int, total: int, seconds: int) -> list[int]:
    """Return `seconds` counts at `top` or one or more below, spread evenly, that sum to `total`."""
    missing = top * seconds - total
    return [
        top - (math.floor((second + 1) * missing / seconds) - math.floor(second * missing / seconds))
        for second in range(seconds)
    ]


def _mend(counts: list[int], top: int, total: int) -> list[int]:
    left, index = total - sum(counts), len(counts) - 1
    kept = counts.index(max(counts))
    while left:
        # The first second at the top stays there, because the window's maximum is given as well.
        if index != kept and (left < 0 or counts[index] < top):
            by = 1 if left > 0 else -1
            counts[index] += by
            left -= by
        index = (index - 1) % len(counts)
    return counts


def constant(sessions: int, seconds: int) -> WorkloadTrace:
    """Build a trace with the same sessions from the first second to the last."""
    steps = [Step(0.0, f"s{number:05d}", SessionChange.ARRIVAL) for number in range(sessions)]
    return checked(f"constant {sessions}", steps, float(seconds))


def square(low: int, high: int, period_s: int, seconds: int, seed: int = 0) -> WorkloadTrace:
    """Build a trace with `low` sessions for half of the period and `high` for the other half."""
    counts = [low if second % period_s < period_s / 2 else high for second in range(seconds)]
    return from_counts(f"square {low}-{high}/{period_s} s", counts, seed)

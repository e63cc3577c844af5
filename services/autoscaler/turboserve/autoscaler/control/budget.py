"""From a demand to a number of workers, and whether fewer workers would hold it."""

from __future__ import annotations

import math
from collections.abc import Callable

from turboserve.contracts.autoscale import LevelParameters

LatencyOf = Callable[[int], float]
"""Latency of a chunk by the number of sessions on the worker, in any unit."""

EPSILON = 1e-9
"""8 / (5 × 0.8) is 2 workers, whatever the last bit says."""


def compute_bound(sessions: int) -> float:
    """L(n) = n: a worker that has no gain from batches (the Table 9 figures, `docs/performance.md`)."""
    return float(sessions)


def budget(
    required: float,
    capacity: int,
    row: LevelParameters,
    latency: LatencyOf = compute_bound,
    most: int | None = None,
) -> int:
    """Workers for `required` sessions at K = `capacity`: ⌈N_req / (K ρ̂)⌉ (5.2.2), or more if λ says so.

    λ weighs workers against the worst latency (Equation 5, C + λ L, with C in workers and L in multiples of a
    lone chunk's): a worker more is taken while it lowers λ L by more than the one it costs. At the paper's
    λ = 0.2 that never happens for K up to 5 (its observation O2).
    """
    if required <= EPSILON:
        return 0
    # One at least: a forecast far below one session needs a worker, though the rounding hides it.
    base = max(math.ceil(required / (capacity * row.target_utilization) - EPSILON), 1)
    weight = row.latency_weight / max(latency(1), EPSILON)
    worst = latency(fullest(required, base))
    # No number of workers brings the latency below a lone chunk's.
    farthest = base + math.floor(weight * max(worst - latency(1), 0.0))
    if most is not None:
        farthest = min(farthest, max(most, base))
    return min(
        range(base, farthest + 1),
        key=lambda size: (size + weight * latency(fullest(required, size)), size),
    )


def fullest(required: float, workers: int) -> int:
    """Sessions on the fullest worker when they are spread evenly; one at least where there are any."""
    return max(math.ceil(required / workers - EPSILON), 1 if required > 0 else 0)


def would_hold(required: int, capacity: int, workers: int, limit: float) -> bool:
    """Whether `workers`, evenly filled, carry `required` sessions with none above `limit` × K or above K."""
    if required == 0:
        return True
    if workers == 0:
        return False
    load = fullest(required, workers)
    return load <= capacity and load / capacity <= limit + EPSILON

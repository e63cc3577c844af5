"""Computes the number of workers for a demand, and whether fewer workers would hold it."""

from __future__ import annotations

import math
from collections.abc import Callable

from turboserve.contracts.autoscale import LevelParameters

LatencyOf = Callable[[int], float]
"""Latency of a chunk by the number of sessions on the worker, in any unit."""
EPSILON = 1e-9
"""Tolerance of rounding errors: 8 / (5 × 0.8) must give exactly 2 workers."""


def compute_bound(sessions: int) -> float:
    """L(n) = n: latency on a worker that gains nothing from batches (Table 9 and `docs/performance.md`)."""
    return float(sessions)


def budget(
    required: float,
    capacity: int,
    row: LevelParameters,
    latency: LatencyOf = compute_bound,
    most: int | None = None,
) -> int:
    """Return the workers for `required` sessions at K = `capacity`: ⌈N_req / (K ρ̂)⌉ (5.2.2), or more by λ.

    λ weighs workers against the worst latency: the size minimizes C + λ L (Equation 5), with C in workers and
    L in multiples of a lone session's latency. So additional workers must lower λ L by more than their
    number. At the paper's λ = 0.2 that never happens for K up to 5 (its observation O2).
    """
    if required <= EPSILON:
        return 0
    # At least one: rounding would give 0 workers for a forecast far below one session.
    base = max(math.ceil(required / (capacity * row.target_utilization) - EPSILON), 1)
    lone = latency(1)
    weight = row.latency_weight / max(lone, EPSILON)
    worst = latency(fullest(required, base))
    # No number of workers lowers the latency below that of a lone session.
    farthest = base + math.floor(weight * max(worst - lone, 0.0))
    if most is not None:
        farthest = min(farthest, max(most, base))
    if farthest == base:
        return base
    return min(
        range(base, farthest + 1),
        key=lambda size: (size + weight * latency(fullest(required, size)), size),
    )


def fullest(required: float, workers: int) -> int:
    """Return the sessions on the fullest worker if they are spread evenly; at least one if there are any."""
    return max(math.ceil(required / workers - EPSILON), 1 if required > 0 else 0)


def would_hold(required: int, capacity: int, workers: int, limit: float) -> bool:
    """Whether `workers`, evenly filled, hold `required` sessions with no worker above `limit` × K or K."""
    if required == 0:
        return True
    if workers == 0:
        return False
    load = fullest(required, workers)
    return load <= capacity and load / capacity <= limit + EPSILON

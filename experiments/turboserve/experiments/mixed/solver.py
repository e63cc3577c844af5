"""Processor time of the shares' program, by the number of kinds."""

from __future__ import annotations

import random
import time
from typing import Any

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.bench.report import percentile
from turboserve.scheduler.placement import Kind, solve_shares

WORKERS = 256
CLASSES = tuple(SessionClass(f"model-{number}") for number in range(6))
KINDS = (1, 4, 8, 16, 32)
WANTED_S = 0.010
LOADS = (0.5, 1.1)
"""Demand as a part of what the pool serves: slack decides below 1, and served fractions above."""


def solver_times(rounds: int, seed: int) -> dict[str, Any]:
    """Measure programs of 256 workers and 6 classes, each with the present placement of the last one."""
    found: dict[str, Any] = {}
    for kinds in KINDS:
        seconds: list[float] = []
        for number in range(rounds):
            seconds += _times(kinds, random.Random(f"solver {kinds} {seed} {number}"))
        p50 = percentile(seconds, 0.5) or 0.0
        p99 = percentile(seconds, 0.99) or 0.0
        found[str(kinds)] = {
            "p50_s": p50,
            "p99_s": p99,
            "p50_of_10_ms": p50 / WANTED_S,
            "p99_of_10_ms": p99 / WANTED_S,
            "programs": len(seconds),
        }
    return found


def _times(count: int, source: random.Random) -> list[float]:
    kinds = [
        Kind(f"k{k}", WORKERS // count, Capability({one: source.randint(2, 20) for one in CLASSES}))
        for k in range(count)
    ]
    full = solve_shares(kinds, dict.fromkeys(CLASSES, 1e5)).served
    least = min(full.values()) * 1e5
    seconds = []
    for load in LOADS:
        demand = {one: round(least * load * source.uniform(0.8, 1.2)) for one in CLASSES}
        placed = solve_shares(kinds, demand).sessions
        for _ in range(4):
            demand = {one: count + source.randint(-2, 2) for one, count in demand.items()}
            began = time.thread_time()
            placed = solve_shares(kinds, demand, placed).sessions
            seconds.append(time.thread_time() - began)
    return seconds

"""The settings that every system is tried with: pool sizes, target utilizations and sessions per worker.

A *capacity* below K is the product's `target_chunk_s` = L(capacity): a worker takes no more sessions, and the
controller counts on no more. Fixed and elastic systems have it alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from turboserve.autoscaler.control.policy import default_table
from turboserve.experiments.autoscale.demand import SLOT_S, TARGET
from turboserve.experiments.autoscale.oracles import slot_needs
from turboserve.experiments.autoscale.plant import Plant, policy_for
from turboserve.experiments.autoscale.sizers import Controlled, Fixed, Sizer, flat_table
from turboserve.experiments.autoscale.trace import WorkloadTrace

LEARNED = 0.0
"""Stands for a learned headroom in the place of ρ̂: the shipped default."""


@dataclass(frozen=True)
class PoolSetting:
    """One setting of a system. A fixed pool has `workers`, an elastic one the rest."""

    capacity: int
    workers: int = 0
    rho: float = LEARNED
    forecast: bool = False

    @property
    def name(self) -> str:
        if self.workers:
            return f"{self.workers} workers, at most {self.capacity} each"
        controller = f"ρ̂ {self.rho:g}" if self.rho else "learned headroom"
        return f"{controller}{', forecast' if self.forecast else ''}, at most {self.capacity} a worker"

    def plant(self, plant: Plant) -> Plant:
        return replace(plant, capacity=self.capacity)

    def sizer(self, trace: WorkloadTrace, plant: Plant) -> Sizer:
        """Return the decider of the pool's size on `plant`, whose capacity is this setting's."""
        if self.workers:
            return Fixed(self.workers)
        begin = slot_needs(trace, plant.capacity, self.rho or TARGET, SLOT_S, plant.most)[0]
        table = flat_table(self.rho, predictive=self.forecast) if self.rho else default_table()
        return Controlled(policy_for(plant, learns=not self.rho), table, max(begin, 1))


SHARES = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.3125)
"""Capacities relative to K: 16, 14, 12, 10, 8, 6 and 5 of 16."""
LARGE_SHARES = (1.0, 0.75, 0.625, 0.5, 0.375)
TARGETS = (0.3, 0.45, 0.6, 0.7, 0.8, 0.9)
"""ρ̂ with K sessions a worker and no forecast."""
LEARNED_SHARES = (1.0, 0.625)
LARGE_WORKERS = 16
"""Clusters with more workers have a coarse grid, because a run takes seconds there."""


def elastic_settings(plant: Plant, peak: int = 0) -> list[PoolSetting]:
    """Return the settings of every elastic system, as far as the cluster holds `peak` sessions."""
    sessions, large = plant.capacity, plant.most > LARGE_WORKERS
    targets = TARGETS[::2] if large else TARGETS
    learned = () if large else LEARNED_SHARES
    shares = LARGE_SHARES if large else SHARES
    found = [
        *(PoolSetting(capacity, rho=TARGET, forecast=True) for capacity in _capacities(sessions, shares)),
        *(PoolSetting(sessions, rho=rho) for rho in targets),
        *(PoolSetting(capacity) for capacity in _capacities(sessions, learned)),
    ]
    return [one for one in found if one.capacity == sessions or one.capacity * plant.most >= peak]


def _capacities(sessions: int, shares: Sequence[float]) -> list[int]:
    return list(dict.fromkeys(max(round(share * sessions), 1) for share in shares))


def fixed_settings(trace: WorkloadTrace, plant: Plant) -> list[PoolSetting]:
    """Return the settings of every fixed pool: each size with K, and with the least that holds the peak."""
    return [
        PoolSetting(capacity, size)
        for size in pool_sizes(trace, plant)
        for capacity in dict.fromkeys((plant.capacity, min(math.ceil(trace.peak / size), plant.capacity)))
    ]


def pool_sizes(trace: WorkloadTrace, plant: Plant) -> list[int]:
    """Return the fixed pools that are tried: from the least that holds the peak up to the cluster."""
    least = min(math.ceil(trace.peak / plant.capacity), plant.most)
    steps = 4 if plant.most > LARGE_WORKERS else 15
    step = max(math.ceil((plant.most - least) / steps), 1)
    return sorted({*range(least, plant.most + 1, step), plant.most})


def describe_grid(plant: Plant) -> Sequence[str]:
    return [setting.name for setting in elastic_settings(plant)]

"""The systems that Figures 4, 7 and 8 compare, and the sweep of one system over its settings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from turboserve.experiments.autoscale.oracles import cheapest_cost
from turboserve.experiments.autoscale.plant import Plant, Resume
from turboserve.experiments.autoscale.simulation import Simulation
from turboserve.experiments.autoscale.sizers import Sizer
from turboserve.experiments.autoscale.trace import WorkloadTrace, changes
from turboserve.experiments.paper.grids import PoolSetting
from turboserve.experiments.paper.metrics import as_json, measure
from turboserve.scheduler.placement import PLACEMENTS, REBALANCERS, Cluster, Links, Migration, Rebalancer
from turboserve.scheduler.placement.drain import drain_suspended
from turboserve.scheduler.placement.plan import Planner
from turboserve.scheduler.placement.types import MigrationKind, Weights

PERIOD_S = 10.0
"""Time between two rebalancings in 3.2."""
ROUND_S = 1.0
"""Time that a periodic rebalancing takes: migrations at once are limited."""


class DrainsSuspended:
    """Proposes only migrations of suspended sessions off draining workers, as the shipped rebalancer does.

    Without migration, a draining worker is released when its active sessions have left, and the states of its
    idle ones are offloaded (6.2).
    """

    def __init__(self) -> None:
        self._links, self._eta = Links(), Weights().eta

    def propose(self, cluster: Cluster, now: float) -> list[Migration]:
        return [
            migration
            for pool in cluster.pools.values()
            if pool.draining
            for migration in drain_suspended(cluster, Planner(cluster, pool, self._links, now), self._eta)
        ]


class Periodic:
    """Rebalances every 10 s and when the set of workers has changed (3.2); drains whenever they are due."""

    def __init__(self, rebalancer: Rebalancer) -> None:
        self._rebalancer = rebalancer
        self._workers: frozenset[str] = frozenset()
        self._changed_at = -math.inf

    def propose(self, cluster: Cluster, now: float) -> list[Migration]:
        workers = frozenset(name for name, worker in cluster.workers.items() if not worker.draining)
        if workers != self._workers:
            self._workers, self._changed_at = workers, now
        due = now % PERIOD_S < ROUND_S or now - self._changed_at < ROUND_S
        migrations = self._rebalancer.propose(cluster, now)
        return [m for m in migrations if due or m.kind is MigrationKind.DRAIN]


@dataclass(frozen=True)
class System:
    """Policies by the names that the scheduler's settings use."""

    placement: str
    migrates: str = "never"
    """`never`, `periodic` or `events` (the shipped rebalancer, after every event)."""
    elastic: bool = False
    """Whether the product's controller sizes the pool."""

    def rebalancer(self) -> Rebalancer:
        """Return a new rebalancer."""
        shipped = REBALANCERS.make("min-max")
        policies: dict[str, Rebalancer] = {
            "never": DrainsSuspended(),
            "periodic": Periodic(shipped),
            "events": shipped,
        }
        return policies[self.migrates]

    def simulation(
        self, trace: WorkloadTrace, plant: Plant, sizer: Sizer, resume: Resume = Resume.BY_POLICY
    ) -> Simulation:
        placement = PLACEMENTS.make(self.placement)
        return Simulation(trace, plant, sizer, self.rebalancer(), placement, resume)


SYSTEMS = {
    "base": System("round-robin"),
    "LAG": System("load-aware"),
    "MAG": System("memory-aware"),
    "base + autoscaling": System("round-robin", elastic=True),
    "LAG + autoscaling": System("load-aware", elastic=True),
    "MAG + autoscaling": System("memory-aware", elastic=True),
    "turboserve": System("min-max", "events", elastic=True),
    "without migration": System("min-max", elastic=True),
    "without autoscaling": System("min-max", "events"),
}
"""7.1 and 7.3. Sessions of one worker run as batches in every system, which helps the baselines."""
SAME_RUNS = {"MAG": "LAG", "MAG + autoscaling": "LAG + autoscaling"}
"""States have one size, so a worker's memory in use is its number of sessions, as its load on equal workers
is. The same choices follow, and LAG's runs are read for MAG."""
STUDY = {
    "base": System("least-loaded"),
    "migration": System("least-loaded", "periodic"),
    "autoscaling": System("least-loaded", elastic=True),
    "joint": System("least-loaded", "periodic", elastic=True),
    "turboserve": System("min-max", "events", elastic=True),
    "turboserve, fixed pool": System("min-max", "events"),
}
"""3.2, and the shipped policies beside it."""
BOUND = "perfect elasticity"


def sweep(
    system: System,
    trace: WorkloadTrace,
    plant: Plant,
    settings: Iterable[PoolSetting],
    resume: Resume = Resume.BY_POLICY,
) -> list[dict[str, Any]]:
    """Run a system with each of the settings."""
    found = []
    for setting in settings:
        limited = setting.plant(plant)
        outcome = system.simulation(trace, limited, setting.sizer(trace, limited), resume).run()
        found.append({"setting": setting.name, **as_json(measure(outcome))})
    return found


def perfect_elasticity(trace: WorkloadTrace, plant: Plant) -> list[dict[str, Any]]:
    """Return the least cost without waits, and its worst latency, for each number of sessions per worker.

    Workers come and go with every session, a start costs the start-up time, and migrations are free. A policy
    that lets sessions wait for a slot may cost less.
    """
    counts: list[tuple[float, int]] = []
    active = 0
    for step, by in changes(trace.steps):
        active += by
        if counts and counts[-1][0] == step.at:
            counts[-1] = (step.at, active)
        else:
            counts.append((step.at, active))
    found = []
    for sessions in range(1, plant.capacity + 1):
        needs = [(at, min(math.ceil(count / sessions), plant.most)) for at, count in counts]
        worst = max(math.ceil(count / plant.most) for _, count in counts)
        worst_ms = round(1000 * plant.latency_s[max(worst, sessions)], 3)
        cost_s = round(cheapest_cost(needs, trace.ends_s, plant.start_up_s), 3)
        found.append(
            {"setting": f"{sessions} a worker", "cost_worker_s": cost_s, "served_ms": worst_ms,
             "with_waits_ms": worst_ms, "late": 0}
        )  # fmt: skip
    return found

"""How far the bottleneck could fall, before any plan is made: which limits are worth planning for."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from math import nextafter

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.plan import Planner
from turboserve.scheduler.placement.tentative_assignment import TentativeAssignment


@dataclass(frozen=True)
class Stage:
    """Limits between which the same workers give the same numbers of sessions away."""

    ceiling_s: float
    """The loosest limit: just below the latency that they have to give up."""
    floor_s: float
    """No plan of this stage gets below: somebody stays there, or has to go there."""
    cost_s: float
    """No plan of this stage costs less, besides what moves anyway."""
    bound_s: float
    """No plan of this stage gains more."""


def stages(
    cluster: Cluster, planner: Planner, start: tuple[float, int], eta: float, least_s: float, most: int
) -> Iterator[Stage]:
    """Stages that may gain more than `least_s`, from the top down.

    `start`: the bottleneck without balancing, and the number of sessions that move anyway. Follows the tops
    down session by session, and beside them the targets up as they fill: n moves take O(n log n). What is
    moved ends at one of the n best targets or worse, and what is not moved stays: both bound L′ from below,
    whoever moves where. Each move costs at least what the nearest target of its source would.
    """
    base_s, others = start
    below_s = nextafter(base_s, 0.0)
    targets = planner.pool.targets
    tentative = TentativeAssignment(cluster)
    for _ in range(others):
        target = tentative.best(targets, below_s)
        if target is None:
            return
        tentative.add(target.id)
    cost_s = 0.0
    for level_s, next_s, least_cost_s in _pulls(cluster, planner, most):
        target = tentative.best(targets, below_s)
        if target is None:
            return
        tentative.add(target.id)
        reached_s = target.curve(target.held + tentative.added[target.id])
        cost_s += least_cost_s
        if reached_s >= level_s or base_s - reached_s - eta * cost_s <= least_s:
            return
        floor_s = max(next_s, reached_s)
        bound_s = base_s - floor_s - eta * cost_s
        if next_s < level_s and bound_s > least_s:
            yield Stage(nextafter(level_s, 0.0), floor_s, cost_s, bound_s)


def _pulls(cluster: Cluster, planner: Planner, most: int) -> Iterator[tuple[float, float, float]]:
    """Takes one session after the other from the worker that is the bottleneck then: the latency it had, the
    bottleneck after, and the least that the move costs. Ends where a session cannot leave."""
    items = planner.pool.tops.items
    lowered: list[tuple[float, str, int]] = []
    position = 0

    def first_s() -> float:
        top_s = -float(items[position][0]) if position < len(items) else 0.0
        return max(top_s, -lowered[0][0]) if lowered else top_s

    for _ in range(most):
        level_s = first_s()
        if level_s <= 0.0:
            return
        if lowered and -lowered[0][0] >= level_s:
            _, name, left = heapq.heappop(lowered)
            entry = cluster.entries[name]
        else:
            entry = cluster.entries[str(items[position][-1])]
            left = entry.staying
            position += 1
        movable = planner.movable(entry)
        if entry.staying - left >= len(movable):
            return
        least_cost_s = planner.least_cost_s(movable[entry.staying - left], entry)
        heapq.heappush(lowered, (-entry.curve(left - 1), entry.id, left - 1))
        yield level_s, first_s(), least_cost_s

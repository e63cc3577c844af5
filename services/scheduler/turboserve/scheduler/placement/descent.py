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
    bound_s: float
    """No plan of this stage gains more."""


def stages(
    cluster: Cluster, planner: Planner, start: tuple[float, int], unit_s: float, least_s: float, most: int
) -> Iterator[Stage]:
    """Stages that may gain more than `least_s`, from the top down.

    `start`: the bottleneck without balancing, and the number of sessions that move anyway. `unit_s`: η times
    the least that a move costs. Follows the tops down session by session, and beside them the targets up as
    they fill: n moves take O(n log n). What is moved ends at one of the n best targets or worse, and what is
    not moved stays: both bound L′ from below, whoever moves where.
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
    for moves, level_s, next_s in _pulls(cluster, planner, most):
        target = tentative.best(targets, below_s)
        if target is None:
            return
        tentative.add(target.id)
        reached_s = target.curve(target.held + tentative.added[target.id])
        if reached_s >= level_s or base_s - reached_s - unit_s * moves <= least_s:
            return
        floor_s = max(next_s, reached_s)
        bound_s = base_s - floor_s - unit_s * moves
        if next_s < level_s and bound_s > least_s:
            yield Stage(nextafter(level_s, 0.0), floor_s, bound_s)


def _pulls(cluster: Cluster, planner: Planner, most: int) -> Iterator[tuple[int, float, float]]:
    """Takes one session after the other from whoever is the bottleneck then: how many so far, the latency it
    had, and the bottleneck after. Ends where one cannot leave."""
    items = planner.pool.tops.items
    lowered: list[tuple[float, str, int]] = []
    position = 0

    def first_s() -> float:
        top_s = -float(items[position][0]) if position < len(items) else 0.0
        return max(top_s, -lowered[0][0]) if lowered else top_s

    for moves in range(1, most + 1):
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
        if entry.staying - left >= len(planner.movable(entry)):
            return
        heapq.heappush(lowered, (-entry.curve(left - 1), entry.id, left - 1))
        yield moves, level_s, first_s()

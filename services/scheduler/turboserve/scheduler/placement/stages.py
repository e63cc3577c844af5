"""The latency limits under which a plan may pay."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from math import nextafter

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.plan import Planner
from turboserve.scheduler.placement.tentative import TentativeAssignment
from turboserve.static_frozen import statically_frozen


@statically_frozen()
class Stage:
    """A range of latency limits for which the same workers give away the same numbers of sessions."""

    ceiling_s: float
    """The loosest limit of the stage, just below the present worst latency of these workers."""
    floor_s: float
    """Lower bound of L′ for plans of the stage: some session stays at this latency or must go to it."""
    cost_s: float
    """Lower bound of a plan's cost in seconds, without the migrations that happen anyway."""
    bound_s: float
    """Upper bound of a plan's gain in seconds."""


def stages(
    cluster: Cluster, planner: Planner, start: tuple[float, int], eta: float, least_s: float, most: int
) -> Iterator[Stage]:
    """Yield the stages that may gain more than `least_s` seconds, from the loosest limit down.

    `start`: the bottleneck without balancing, in seconds, and the number of sessions that migrate anyway.

    The search takes sessions one by one from the slowest worker and fills the best targets with them. Two
    facts bound L′ from below, whichever sessions migrate to whichever targets: n sessions end on the n best
    places or worse, and workers that give away no more sessions keep their latency. Each migration costs at
    least as much as one to the nearest target of its source. Cost: O(n log n) for n sessions.
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
    """Take sessions one by one, each from the worker that is then the bottleneck.

    Yields that worker's latency, the bottleneck after the step and the least cost of the migration, in
    seconds. Ends when the bottleneck has no session that may leave.
    """
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

"""Relieves workers one by one where too many share the bottleneck for it to fall."""

from __future__ import annotations

import heapq

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.plan import Plan, Planner, Step
from turboserve.scheduler.placement.pool import Item, PoolEntry
from turboserve.scheduler.placement.rescue import LateGuard
from turboserve.scheduler.placement.types import Migration, MigrationKind, SessionState, Weights


def spread(
    cluster: Cluster, planner: Planner, plan: Plan, most: int, weights: Weights, guard: LateGuard
) -> list[Migration]:
    """Propose up to `most` migrations on top of `plan`, and count them in `plan`.

    If many workers share the bottleneck, L falls only after as many migrations, which may cost more than they
    gain. But each of them makes chunks faster for all sessions that remain on its source. So Γ is taken over
    the two workers of a migration: the source's latency now, minus the worse of both latencies afterwards.

    The source is the worker that stays slowest after losing a session. The target must stay at least as fast
    as the source becomes. So no such migration is worth undoing, and profile noise causes none. `guard`
    refuses migrations that make further chunks late.
    """
    sources = _Sources(cluster, planner, plan)
    migrations: list[Migration] = []
    steps = list(plan.steps)
    for _ in range(weights.horizon):
        source = sources.first() if len(migrations) < most else None
        if source is None:
            break
        there = plan.sessions_on(source)
        before_s, after_s = source.curve(there), source.curve(there - 1)
        session = sources.session(source)
        excluded = session.excluded if session is not None else ()
        target = plan.tentative.best(planner.pool.targets, after_s, excluded)
        if target is None and not excluded:
            break
        if session is None or target is None:
            sources.skip()
            continue
        cost_s = planner.cost_s(session, source, target)
        gain_s = before_s - after_s - weights.eta * cost_s
        step = Step(session, source, target, cost_s, drain=False)
        if gain_s <= weights.least_gain * before_s or guard.worsens([step], given=steps):
            sources.skip()
            continue
        steps.append(step)
        plan.tentative.add(target.id)
        sources.take(source, session)
        numbers = {
            "source_latency_s": before_s,
            "source_latency_after_s": after_s,
            "target_latency_s": plan.level_s(target),
            "source_sessions": there,
            "target_sessions": plan.sessions_on(target),
            "cost_s": cost_s,
            "eta": weights.eta,
            "state_bytes": session.state_bytes,
        }
        reason = (
            f"chunks on {source.id} take {after_s:.3g} s instead of {before_s:.3g} s then, and "
            f"{numbers['target_latency_s']:.3g} s on {target.id}, which has more slack"
        )
        migrations.append(
            Migration(session.id, source.id, target.id, gain_s, cost_s, reason, MigrationKind.SPREAD, numbers)
        )
    return migrations


class _Sources:
    """Source workers in the order of `Pool.spare`, updated as sessions are taken from them."""

    def __init__(self, cluster: Cluster, planner: Planner, plan: Plan) -> None:
        self._entries = cluster.entries
        self._planner = planner
        self._plan = plan
        self._gone = {step.session.id for step in plan.steps}
        self._heap: list[Item] = []
        self._position = 0

    def first(self) -> PoolEntry | None:
        items, heap = self._planner.pool.spare.items, self._heap
        # Sessions that the plan takes from a worker only move that worker further back.
        while self._position < len(items) and (not heap or items[self._position] < heap[0]):
            entry = self._entries[str(items[self._position][-1])]
            self._position += 1
            self._push(entry)
        return self._entries[str(heap[0][-1])] if heap else None

    def session(self, entry: PoolEntry) -> SessionState | None:
        """Return the worker's session that is cheapest to migrate; None if there is none."""
        return next((s for s in self._planner.movable(entry) if s.id not in self._gone), None)

    def skip(self) -> None:
        """Drop the first worker as a source."""
        heapq.heappop(self._heap)

    def take(self, entry: PoolEntry, session: SessionState) -> None:
        """Take `session` from `entry`, which must be the first worker."""
        self._gone.add(session.id)
        self._plan.taken[entry.id] = self._plan.taken.get(entry.id, 0) + 1
        heapq.heappop(self._heap)
        self._push(entry)

    def _push(self, entry: PoolEntry) -> None:
        left = self._plan.sessions_on(entry) - 1
        if left > 0:
            heapq.heappush(self._heap, (-entry.curve(left), entry.id))

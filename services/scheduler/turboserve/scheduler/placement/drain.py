"""Proposals of migrations that empty draining workers: of active and of suspended sessions."""

from __future__ import annotations

import heapq

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.plan import Plan, Planner, Step
from turboserve.scheduler.placement.pool import PoolEntry
from turboserve.scheduler.placement.types import Migration, MigrationKind, SessionState


def drain_active(step: Step, before_s: float, base: Plan, drains: int, eta: float) -> Migration:
    """Return the proposal for a step of `base`, the plan of all drains.

    `before_s`: bottleneck without the plan, seconds. `drains`: number of steps that share its gain.
    """
    return Migration(
        session=step.session.id,
        source=step.source.id,
        target=step.target.id,
        gain_s=(before_s - base.latency_s) / drains - eta * step.cost_s,
        cost_s=step.cost_s,
        reason=f"{step.source.id} is draining; the bottleneck latency grows least on {step.target.id}",
        kind=MigrationKind.DRAIN,
        numbers=base.numbers(step, before_s, eta),
    )


def drain_suspended(cluster: Cluster, planner: Planner, eta: float) -> list[Migration]:
    """Propose one migration per suspended session, to the worker with the fewest sessions per slot.

    Suspended sessions count in that number, because each is resumed on its worker if there is room then. They
    need no slot, only host memory.
    """
    workers_by_load = [(float(item[0]), str(item[-1])) for item in planner.pool.suspended_ranking.items]
    migrations: list[Migration] = []
    for name in sorted(planner.pool.draining):
        source = cluster.entries[name]
        if source.state.suspect:
            continue
        for session in (cluster.sessions[suspended] for suspended in sorted(source.suspended)):
            # A session that is still migrating to this worker must arrive first.
            if not session.movable or session.target is not None or session.worker != name:
                continue
            target = _take(cluster, workers_by_load, session)
            if target is not None:
                migrations.append(_migration(planner, session, source, target, eta))
    return migrations


def _take(
    cluster: Cluster, workers_by_load: list[tuple[float, str]], session: SessionState
) -> PoolEntry | None:
    aside = []
    found: PoolEntry | None = None
    while workers_by_load and found is None:
        load, name = heapq.heappop(workers_by_load)
        entry = cluster.entries[name]
        if name not in session.excluded:
            found = entry
            load += 1 / entry.slots
        aside.append((load, name))
    for item in aside:
        heapq.heappush(workers_by_load, item)
    return found


def _migration(
    planner: Planner, session: SessionState, source: PoolEntry, target: PoolEntry, eta: float
) -> Migration:
    cost_s = planner.cost_s(session, source, target)
    return Migration(
        session=session.id,
        source=source.id,
        target=target.id,
        gain_s=-eta * cost_s,
        cost_s=cost_s,
        reason=f"{source.id} is draining; {target.id} has the fewest sessions for its size",
        kind=MigrationKind.DRAIN,
        numbers={"cost_s": cost_s, "eta": eta, "state_bytes": session.state_bytes},
    )

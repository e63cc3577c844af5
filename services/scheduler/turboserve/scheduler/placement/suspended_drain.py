"""Proposes migrations for the suspended sessions of draining workers."""

from __future__ import annotations

import heapq

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.migrations import Migration, MigrationKind
from turboserve.scheduler.placement.plan import Planner
from turboserve.scheduler.placement.pool import PoolEntry
from turboserve.scheduler.placement.states import SessionState


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

"""Quotas as placement and rebalancing use them: a preference of the one, a limit of the other."""

from __future__ import annotations

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.pool import Pool, PoolEntry
from turboserve.scheduler.placement.ranking import Item
from turboserve.scheduler.placement.tentative import TentativeAssignment
from turboserve.scheduler.placement.types import Demand, Migration


def best_within(cluster: Cluster, tentative: TentativeAssignment, demand: Demand) -> PoolEntry | None:
    """Return the best worker by min-max of those whose quota of the session's class is not used up.

    Workers of the last resort do not count. Cost: O(n) for n workers with a quota of the class.
    """
    found: list[tuple[Item, PoolEntry]] = []
    for name, quota in cluster.quotas.get(demand.model, {}).items():
        entry = cluster.entries.get(name)
        if entry is None or name in demand.excluded or not entry.serves:
            continue
        added = tentative.added.get(name, 0) - (name == demand.counted_on)
        fits = entry.fits(demand.model, demand.weights_digest)
        if not fits or entry.held + added >= min(quota, entry.slots):
            continue
        if (item := entry.target_item(added)) is not None:
            found.append((item, entry))
    return min(found, key=lambda one: one[0])[1] if found else None


def used_up(cluster: Cluster, pool: Pool, model: str, source: str) -> frozenset[str]:
    """Return the workers of a pool to which no session of `source` migrates for balance or to save chunks.

    Those are the workers whose quota is used up, while `source` has no session beyond its own quota.
    Placement would fill `source` again, and so on.
    """
    quotas = cluster.quotas.get(model)
    if quotas is None or cluster.entries[source].staying > quotas.get(source, 0):
        return frozenset()
    return frozenset(name for name in pool.targets if cluster.entries[name].held >= quotas.get(name, 0))


class QuotaGuard:
    """Refuses migrations that undo together what quotas ask for. `used_up` says it of each alone."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._left: dict[str, int] = {}
        self._added: dict[str, int] = {}

    def refuses(self, migration: Migration) -> bool:
        """Whether the migration leaves a worker below its quota for one whose quota is used up."""
        cluster = self._cluster
        quotas = cluster.quotas.get(cluster.sessions[migration.session].model)
        if quotas is None:
            return False
        source, target = (cluster.entries[name] for name in (migration.source, migration.target))
        stays = source.staying - self._left.get(source.id, 0) <= quotas.get(source.id, 0)
        return stays and target.held + self._added.get(target.id, 0) >= quotas.get(target.id, 0)

    def begun(self, migration: Migration) -> None:
        """Count a migration that begins."""
        self._left[migration.source] = self._left.get(migration.source, 0) + 1
        self._added[migration.target] = self._added.get(migration.target, 0) + 1

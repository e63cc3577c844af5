"""The last proposals of a rebalancer, which hold as long as nothing that they depend on has changed."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.links import Link, Links
from turboserve.scheduler.placement.types import Migration, Weights


def costs_of(links: Links) -> tuple[Link, ...]:
    """Return what the costs of migrations depend on."""
    return tuple(links.known.values())


@dataclass(frozen=True)
class Proposals:
    """Migrations that do not depend on slacks, and what they depend on."""

    cluster: Cluster
    changes: int
    """`Cluster.changes` of the proposals."""
    weights: Weights
    costs: tuple[Link, ...]
    """See `costs_of`."""
    since: float
    until: float
    """From `since` to before `until`, the same sessions have rested."""
    migrations: tuple[Migration, ...]

    def hold(self, cluster: Cluster, weights: Weights, links: Links, now: float) -> bool:
        """Whether a rebalancer would propose the same again at time `now`."""
        return (
            cluster is self.cluster
            and cluster.changes == self.changes
            and weights is self.weights
            and costs_of(links) == self.costs
            and self.since <= now < self.until
        )

"""Assigns sessions to workers and proposes migrations. No clock, no I/O, no randomness (TurboServe, 5.2.1).

- `interface`: the interface of assignment.
- `migrations`: the interface of rebalancing.
- `cluster`: the workers and sessions that both work on.
"""

from turboserve.policies import Policies
from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.demands import Candidate, Choice, Demand
from turboserve.scheduler.placement.interface import Assigner, Placement
from turboserve.scheduler.placement.links import Link, LinkKind, Links
from turboserve.scheduler.placement.migrations import Migration, MigrationKind, NeverMigrates, Rebalancer
from turboserve.scheduler.placement.minmax import MinMax
from turboserve.scheduler.placement.rebalance import MinMaxRebalancer
from turboserve.scheduler.placement.states import SessionState, WorkerState
from turboserve.scheduler.placement.weights import Weights

PLACEMENTS: Policies[Placement] = Policies("placement", {"min-max": MinMax})
"""Placement policies by the name that the setting `placement` uses."""

__all__ = [
    "PLACEMENTS",
    "Assigner",
    "Candidate",
    "Choice",
    "Cluster",
    "Demand",
    "Link",
    "LinkKind",
    "Links",
    "Migration",
    "MigrationKind",
    "MinMax",
    "MinMaxRebalancer",
    "NeverMigrates",
    "Placement",
    "Rebalancer",
    "SessionState",
    "Weights",
    "WorkerState",
]

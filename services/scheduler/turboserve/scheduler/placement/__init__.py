"""Assigns sessions to workers and proposes migrations. No clock, no I/O, no randomness (TurboServe, 5.2.1).

- `types`: what placement reads and returns.
- `interface`: the interfaces of assignment and of rebalancing.
- `cluster`: the workers and sessions that both work on.
"""

from turboserve.policies import Policies
from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.interface import Assigner, NeverMigrates, Placement, Rebalancer
from turboserve.scheduler.placement.links import Link, LinkKind, Links
from turboserve.scheduler.placement.minmax import MinMax
from turboserve.scheduler.placement.mixed import MixedMinMax
from turboserve.scheduler.placement.rebalance import MinMaxRebalancer
from turboserve.scheduler.placement.share_keeper import ShareKeeper, Solve
from turboserve.scheduler.placement.shares import Kind, Shares, solve_shares
from turboserve.scheduler.placement.types import (
    Candidate,
    Choice,
    Demand,
    Migration,
    MigrationKind,
    SessionState,
    Weights,
    WorkerState,
)
from turboserve.scheduler.placement.urgency import ReportedSlack

PLACEMENTS: Policies[Placement] = Policies("placement", {"min-max": MinMax})
"""Placement policies by the name that the setting `placement` uses."""
SHARES: Policies[Solve] = Policies("shares", {"exact": lambda: solve_shares})
"""Policies that decide how many sessions of each class each kind of worker gets, by name."""
REBALANCERS: Policies[Rebalancer] = Policies("rebalancer", {"min-max": MinMaxRebalancer})
"""Rebalancers by the name that the setting `rebalancer` uses."""
__all__ = [
    "PLACEMENTS",
    "REBALANCERS",
    "SHARES",
    "Assigner",
    "Candidate",
    "Choice",
    "Cluster",
    "Demand",
    "Kind",
    "Link",
    "LinkKind",
    "Links",
    "Migration",
    "MigrationKind",
    "MinMax",
    "MinMaxRebalancer",
    "MixedMinMax",
    "NeverMigrates",
    "Placement",
    "Rebalancer",
    "ReportedSlack",
    "SessionState",
    "ShareKeeper",
    "Shares",
    "Solve",
    "Weights",
    "WorkerState",
    "solve_shares",
]

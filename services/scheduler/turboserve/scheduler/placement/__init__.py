"""Where sessions go and when they move: pure, no clock, no randomness (TurboServe, 5.2.1).

`interface` is assignment over a list of candidates, `cluster` the picture that both work on, `moves` the
interface of rebalancing.
"""

from turboserve.policies import Policies
from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.demands import Candidate, Choice, Demand
from turboserve.scheduler.placement.interface import Assigner, Placement
from turboserve.scheduler.placement.links import Link, LinkKind, Links
from turboserve.scheduler.placement.minmax import MinMax
from turboserve.scheduler.placement.moves import Move, MoveKind, NeverMoves, Rebalancer
from turboserve.scheduler.placement.rebalance import MinMaxRebalancer
from turboserve.scheduler.placement.states import SessionState, WorkerState
from turboserve.scheduler.placement.weights import Weights

PLACEMENTS: Policies[Placement] = Policies("placement", {"min-max": MinMax})
"""By the name that the settings use."""

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
    "MinMax",
    "MinMaxRebalancer",
    "Move",
    "MoveKind",
    "NeverMoves",
    "Placement",
    "Rebalancer",
    "SessionState",
    "Weights",
    "WorkerState",
]

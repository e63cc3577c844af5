"""Moves of live sessions between workers: what is proposed, and the interface of who proposes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from turboserve.scheduler.placement.cluster import Cluster


class MoveKind(StrEnum):
    """Why a session is to move."""

    BALANCE = "balance"
    """The worst chunk latency of its model falls by more than the move costs."""
    SPREAD = "spread"
    """The bottleneck is shared by too many to fall; this one of them is relieved, by a worker that stays
    no slower than it: new workers are put to use so."""
    DRAIN = "drain"
    """Its worker is to be emptied; done whatever it gains."""


@dataclass(frozen=True)
class Move:
    """One session goes from one worker to another."""

    session: str
    source: str
    target: str
    gain_s: float
    """Γ = L − L′ − η κ, seconds. Moves that lower the bottleneck only together share their gain equally; for
    a spread, L is taken over its two workers. Positive, except for drains."""
    cost_s: float
    """κ: what the α–β model expects the transfer to take."""
    reason: str
    """For the decision log: a sentence."""
    kind: MoveKind = MoveKind.BALANCE
    numbers: Mapping[str, float] = field(default_factory=dict)
    """For the decision log: latencies, sessions and bytes that led to it."""


class Rebalancer(Protocol):
    """Proposes moves (TurboServe, 5.2.1: migration-aware min-max rebalancing).

    Depends on nothing but its arguments: the same cluster and time give the same moves, in the same order.
    A proposal counts on the cluster as it is, moves under way included (`SessionState.target`); whoever
    begins a move puts the session with its target before the next call. Each session is in at most one move;
    a target is ready, not suspect, of the session's model, and has a slot for it (an active session) even if
    no move under way ever ends. Moves of one call may all be begun at once. They come in the order in which
    they should be begun if not all can: drains first, active sessions before suspended ones.
    """

    def propose(self, cluster: Cluster, now: float) -> list[Move]: ...


class NeverMoves:
    """Proposes no move: the rebalancer beside a placement that never migrates sessions."""

    def propose(self, cluster: Cluster, now: float) -> list[Move]:
        return []

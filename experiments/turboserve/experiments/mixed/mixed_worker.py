"""A worker in virtual time, with the sessions on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from turboserve.autoscaler.control.pool_offers import PoolOffer
from turboserve.scheduler.placement.pool import LatencyCurve


@dataclass(eq=False)
class Visit:
    """One session."""

    model: str
    came_at: float
    leaves_at: float


@dataclass(eq=False)
class MixedWorker:
    """One worker with one class."""

    name: str
    offer: PoolOffer
    model: str
    capacity: int
    profile: Mapping[int, float]
    """L(b), seconds."""
    ready_at: float
    leaving: bool = False
    sessions: list[Visit] = field(default_factory=list)

    @property
    def latency_s(self) -> float:
        """Latency of a chunk now, seconds."""
        return LatencyCurve(self.profile, self.capacity)(len(self.sessions))

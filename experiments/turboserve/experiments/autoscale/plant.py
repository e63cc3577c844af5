"""The modeled plant: workers as latency profiles, with a start-up delay and a cost of migrations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from turboserve.autoscaler.control.policy import ControlPolicy

PAPER_L_S = 0.1336
"""L(n) = 133.6 ms × n: Tables 9 and 10 of TurboServe imply it at five sessions."""


EPSILON = 1e-9


def linear(capacity: int, lone_s: float = PAPER_L_S) -> dict[int, float]:
    """Return L(n) of a compute-bound GPU, in seconds by number of sessions."""
    return {n: n * lone_s for n in range(1, capacity + 1)}


class Resume(StrEnum):
    """Where a session goes when it becomes active again."""

    BY_POLICY = "by policy"
    """The placement policy knows which worker holds the session's state."""
    RETURNS = "returns"
    """To the worker that holds its state, if there is room; otherwise as by the policy."""
    ANYWHERE = "anywhere"
    """As a new session."""


@dataclass(frozen=True)
class Plant:
    """One kind of worker and the limits of the pool. Times in seconds.

    Chunks come back to back: a session on a worker with n sessions makes one every L(n). A session that
    migrates runs at its source meanwhile, because the copy overlaps with chunks, and its next chunk takes
    `migration_s` more.
    """

    capacity: int = 5
    """K: sessions per worker."""
    most: int = 16
    start_up_s: float = 10.0
    """Time from the decision to a worker that serves; it is paid for."""
    migration_s: float = 0.024
    """Additional time of the chunk after a migration. Table 4: 23 to 30 ms."""
    target_s: float = 0.670
    """Maximum latency of a chunk that is not late."""
    latency_s: Mapping[int, float] = field(default_factory=lambda: linear(5))
    floor_factor: float = 1.0
    """Time of a chunk at the floor's configuration, relative to the best one. 1: quality is never lowered."""
    signal_age_s: float = 0.0
    """Age of the workers' load reports: the time until the scheduler, and by it the autoscaler, learns that a
    session has idled or departed. 0: at once, as the product's events are. A scheduler knows its own
    placements and migrations, and the sessions that ask for a slot."""
    memory_slots: int = 10_000
    """Sessions whose states fit into a worker's memory: they bound K_floor."""

    @property
    def floor_capacity(self) -> int:
        """K_floor: sessions that a worker carries within `target_s` if all chunks are at the floor."""
        if self.floor_factor >= 1.0:
            return self.capacity
        lone_s = self.latency_s[1] * self.floor_factor
        return max(min(math.floor(self.target_s / lone_s + EPSILON), self.memory_slots), self.capacity)

    def lowered(self, sessions: int, more_s: float = 0.0) -> int:
        """Return the fewest of `sessions` chunks that must be lowered so that none is late.

        A lowered chunk takes `floor_factor` of its time, and chunks take turns on the worker. `more_s`: time
        that this chunk takes besides.
        """
        saved_s = self.latency_s[1] * (1.0 - self.floor_factor)
        excess_s = self._best_s(sessions) + more_s - self.target_s
        return min(max(math.ceil(excess_s / saved_s - EPSILON), 0), sessions) if saved_s > 0 else 0

    def chunk_s(self, sessions: int, lowered: int) -> float:
        """Return the seconds of a chunk with `sessions` on the worker, `lowered` of them at the floor."""
        return self._best_s(sessions) - lowered * self.latency_s[1] * (1.0 - self.floor_factor)

    def _best_s(self, sessions: int) -> float:
        """Return L(n), in proportion beyond K."""
        known = self.latency_s.get(sessions)
        return sessions * self.latency_s[1] if known is None else known


def policy_for(plant: Plant, **changed: Any) -> ControlPolicy:
    """Return the product's defaults with this plant's limits. The forecast's horizon is the start-up time."""
    horizon_s = max(plant.start_up_s, 1.0)
    return ControlPolicy(
        **{"most": plant.most, "capacity": plant.capacity, "horizon_s": horizon_s, **changed}
    )

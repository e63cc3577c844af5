"""The modeled plant: workers as latency profiles, with a start-up delay and a cost of migrations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from turboserve.autoscaler.control.policy import ControlPolicy

PAPER_L_S = 0.1336
"""L(n) = 133.6 ms × n: Tables 9 and 10 of TurboServe imply it at five sessions."""


def linear(capacity: int, lone_s: float = PAPER_L_S) -> dict[int, float]:
    """Return L(n) of a compute-bound GPU, in seconds by number of sessions."""
    return {n: n * lone_s for n in range(1, capacity + 1)}


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


def policy_for(plant: Plant, **changed: Any) -> ControlPolicy:
    """Return the product's defaults with this plant's limits. The forecast's horizon is the start-up time."""
    horizon_s = max(plant.start_up_s, 1.0)
    return ControlPolicy(
        **{"most": plant.most, "capacity": plant.capacity, "horizon_s": horizon_s, **changed}
    )

"""What is modelled instead of run: workers as latency profiles that start late and move at a cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from turboserve.autoscaler.control.policy import ControlPolicy

PAPER_L_S = 0.1336
"""L(n) = 133.6 ms × n: what Tables 9 and 10 of TurboServe imply at five sessions."""


def linear(capacity: int, lone_s: float = PAPER_L_S) -> dict[int, float]:
    """L(n) of a compute-bound GPU, seconds by sessions."""
    return {n: n * lone_s for n in range(1, capacity + 1)}


@dataclass(frozen=True)
class Plant:
    """One kind of worker and the limits of the pool. Times in seconds.

    Chunks come back to back: a session on a worker with n sessions makes one every L(n). One whose state
    moves runs at its source meanwhile (the copy overlaps with chunks) and its next chunk takes `move_s` more.
    """

    capacity: int = 5
    """K."""
    most: int = 16
    start_up_s: float = 10.0
    """From the decision to a worker that serves; paid for."""
    move_s: float = 0.024
    """Table 4: 23 to 30 ms."""
    target_s: float = 0.670
    """No chunk later than this."""
    latency_s: Mapping[int, float] = field(default_factory=lambda: linear(5))


def policy_for(plant: Plant, **changed: Any) -> ControlPolicy:
    """The product's defaults with this plant's limits; the forecast looks as far as a start-up takes."""
    horizon_s = max(plant.start_up_s, 1.0)
    return ControlPolicy(
        **{"most": plant.most, "capacity": plant.capacity, "horizon_s": horizon_s, **changed}
    )

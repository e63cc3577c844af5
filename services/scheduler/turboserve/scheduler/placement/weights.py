"""The parameters of rebalancing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Weights:
    """Minimum gain and maximum number of migrations."""

    eta: float = 0.1
    """η: seconds of bottleneck latency that one second of transfer must save. It is small, since a migration
    hardly interrupts the session (7.5)."""
    least_gain: float = 0.01
    """Minimum gain of a migration, relative to the latency that it lowers. Less is noise of the profiles."""
    migrations_at_once: int = 8
    """Maximum number of sessions of one pool that migrate at the same time, without drains."""
    horizon: int = 128
    """Maximum number of migrations in a plan. A plan with more than `migrations_at_once` takes several
    decisions."""
    spreads: bool = True
    """Whether sessions also migrate if the overall bottleneck stays and only the source becomes faster."""

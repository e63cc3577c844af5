"""The parameters of rebalancing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Weights:
    """What a move has to gain, and how many there may be."""

    eta: float = 0.1
    """η: seconds of bottleneck latency that a second of transfer must save; small, since a move hardly stops
    the session (7.5)."""
    least_gain: float = 0.01
    """Moves that gain less than this part of the bottleneck's latency are noise of the profiles."""
    moves_at_once: int = 8
    """Sessions of one model that are on their way at once, drains not counted."""
    horizon: int = 128
    """Moves that a plan may take; they are made over several decisions if there are more than at once."""
    spreads: bool = True
    """Also move where the bottleneck as a whole stays, but two workers serve their sessions faster."""

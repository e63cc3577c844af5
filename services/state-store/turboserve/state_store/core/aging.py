"""The aging time, by which rows and chunks are removed after their retention.

A wall clock that is wrong for a moment must not remove data that is kept for weeks. So the aging time follows
the monotonic clock. It advances faster, by at most `CATCH_UP`, while it is behind the wall clock, and never
exceeds the wall clock. A step of the wall clock backwards moves it back, which removes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

CATCH_UP = 0.1
"""Share of elapsed time by which the aging time catches up with the wall clock: after a machine was off or a
clock was corrected, data ages at most a tenth faster."""
RESTART_S = 300.0
"""Maximum seconds that a new process takes from the wall clock, since no process has measured the time
before."""


@dataclass(frozen=True)
class Aging:
    """The aging time at the last look, Unix seconds."""

    aged_to: float
    wall: float
    """The wall clock at the last look."""


def first(wall: float) -> Aging:
    """Return the aging time of a new store."""
    return Aging(wall, wall)


def went_on(before: Aging, wall: float, elapsed_s: float | None) -> Aging:
    """Return the aging time after `elapsed_s` monotonic seconds; None: another process looked last."""
    if elapsed_s is None:
        elapsed_s = min(max(wall - before.wall, 0.0), RESTART_S)
    return Aging(min(wall, before.aged_to + elapsed_s * (1.0 + CATCH_UP)), wall)

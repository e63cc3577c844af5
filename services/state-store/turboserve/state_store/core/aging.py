"""How far time has come for what ages: rows and chunks that are removed after a while.

A wall clock that is wrong for a moment must not remove what is kept for weeks. So the time that ages things
does not follow it: it goes on as the monotonic clock does, by at most `CATCH_UP` faster where it lies behind,
and never beyond the wall clock. A step backwards moves it back, which removes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

CATCH_UP = 0.1
"""What lies behind the wall clock is made up for at this share of the time that passes: a machine that was
off, or a clock that was set right, makes nothing age more than a tenth faster."""
RESTART_S = 300.0
"""Seconds that a new process takes the wall clock's word for: nobody has measured what came before."""


@dataclass(frozen=True)
class Aging:
    """How far time had come at the last look, Unix seconds."""

    aged_to: float
    wall: float
    """What the wall clock said then."""


def first(wall: float) -> Aging:
    """Of a store that has kept nothing yet."""
    return Aging(wall, wall)


def went_on(before: Aging, wall: float, elapsed_s: float | None) -> Aging:
    """After `elapsed_s` monotonic seconds; None: the last look was another process's."""
    if elapsed_s is None:
        elapsed_s = min(max(wall - before.wall, 0.0), RESTART_S)
    return Aging(min(wall, before.aged_to + elapsed_s * (1.0 + CATCH_UP)), wall)

"""Clocks for shells. Cores read no clock: every call passes the time in."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic time and of wall-clock time."""

    def monotonic(self) -> float:
        """Seconds for deadlines and durations. Never goes back. Not comparable between machines."""

    def wall(self) -> float:
        """Seconds since the Unix epoch, to show to people."""


def until_multiple(step_s: float, now: float) -> float:
    """Return the seconds until the next multiple of `step_s`.

    Loops that work at multiples of their intervals work at the same times: the process wakes up less often.
    """
    return step_s - now % step_s


class SystemClock:
    """The machine's own clock."""

    # The functions themselves: methods around them would double the cost of a reading.
    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

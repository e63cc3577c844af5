"""Time as the shells see it. Cores are told the time and never ask."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The two times there are."""

    def monotonic(self) -> float:
        """Seconds, for deadlines and durations; never goes back, means nothing elsewhere."""

    def wall(self) -> float:
        """Seconds since the epoch, for people."""


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class VirtualClock:
    """A clock that moves when told to: for tests and simulation."""

    def __init__(self, start_s: float = 0.0, wall_offset_s: float = 1_700_000_000.0) -> None:
        self._now_s = start_s
        self._wall_offset_s = wall_offset_s

    def monotonic(self) -> float:
        return self._now_s

    def wall(self) -> float:
        return self._now_s + self._wall_offset_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"seconds: {seconds} is below 0; a clock never goes back")
        self._now_s += seconds

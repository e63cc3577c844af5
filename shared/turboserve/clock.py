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

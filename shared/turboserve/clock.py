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


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

"""A clock for tests of code that uses a `turboserve.clock.Clock`."""

from __future__ import annotations


class VirtualClock:
    """A clock that moves only by `advance`."""

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

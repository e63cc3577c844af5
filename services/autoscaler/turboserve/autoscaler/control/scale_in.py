"""What delays a scale-in: the peak of a window, and the backoff after mistakes."""

from __future__ import annotations

from collections import deque


class Peak:
    """Values added at rising times. Each holds until the next one, and counts for `window_s` after that."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._falling: deque[tuple[float, int]] = deque()
        """(last time at which the value held, value): values fall strictly, times rise."""

    def add(self, value: int, now: float) -> None:
        if self._falling:
            # The last value held until `now`.
            self._falling[-1] = (now, self._falling[-1][1])
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((now, value))
        while self._falling[0][0] < now - self._window_s:
            self._falling.popleft()

    def over(self, window_s: float, now: float) -> int:
        """Return the largest value of the last `window_s`, up to the whole window; 0 if there is none."""
        return next((value for at, value in self._falling if at >= now - window_s), 0)

    @property
    def value(self) -> int:
        """The largest value of the window; 0 if there is none."""
        return self._falling[0][1] if self._falling else 0


FARTHEST = 8
"""Largest factor on the window."""


class ScaleInBackoff:
    """A factor on the scale-in window. Every mistake doubles it, and every other scale-in halves it.

    A scale-in is a mistake if the pool grows again within `pays_s`, the start-up time of a worker: a new
    start costs more than the scale-in saved. So the pool keeps its size during faster waves of load.
    """

    def __init__(self, pays_s: float) -> None:
        self.factor = 1
        self._pays_s = pays_s
        self._shrank_at: float | None = None

    def shrank(self, now: float) -> None:
        """Note that the pool has shrunk."""
        if self._shrank_at is not None and now - self._shrank_at >= self._pays_s:
            self.factor = max(self.factor // 2, 1)
        self._shrank_at = now

    def grew(self, now: float) -> None:
        """Note that the pool has grown."""
        if self._shrank_at is not None and now - self._shrank_at < self._pays_s:
            self.factor = min(self.factor * 2, FARTHEST)
            self._shrank_at = None

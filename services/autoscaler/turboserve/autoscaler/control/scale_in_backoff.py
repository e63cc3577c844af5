"""Extends the wait before a scale-in after scale-ins that were mistakes."""

from __future__ import annotations

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

"""The time that a decode worker takes for one chunk, measured while it lives. Pure."""

from __future__ import annotations

from collections import deque

SAMPLES = 8
"""Newest chunks of which the fastest counts: noise and other processes only add time."""
NOISE = 0.1
"""Least relative change that counts. Each one divides the sessions of all homes again."""


class ChunkTime:
    """The time of a chunk, seconds."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: as measured at the start."""
        self.seconds = seconds
        self._newest: deque[float] = deque(maxlen=SAMPLES)

    def observe(self, seconds: float) -> bool:
        """Add the time of a chunk that was asked for. Returns whether `self.seconds` has changed."""
        self._newest.append(seconds)
        return len(self._newest) == SAMPLES and self._change(min(self._newest))

    def probed(self, seconds: float) -> bool:
        """Take the fastest of several chunks that were decoded to measure. Returns as `observe`."""
        self._newest.clear()
        return self._change(seconds)

    def _change(self, seconds: float) -> bool:
        if abs(seconds - self.seconds) <= NOISE * self.seconds:
            return False
        self.seconds = seconds
        return True

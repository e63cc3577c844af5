"""Measures how long workers take to start, from the numbers of ready and starting workers."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

from turboserve.autoscaler.control.events import PoolObserved

KEPT = 15
"""Number of starts whose median counts."""
LONGEST_S = 3600.0


class StartUpMeter:
    """The median time of the last starts. Before the first one, the configured time."""

    def __init__(self, configured_s: float) -> None:
        self._configured_s = configured_s
        self._ready: int | None = None
        self._launched: deque[float] = deque()
        """When each starting worker was seen first, rising."""
        self._found: deque[float] = deque(maxlen=KEPT)

    @property
    def value_s(self) -> float:
        """Start-up time of a worker, seconds."""
        return statistics.median(self._found) if self._found else self._configured_s

    @property
    def measured_s(self) -> tuple[float, ...]:
        """The measured start-ups, oldest first, seconds."""
        return tuple(self._found)

    def restore(self, measured_s: Iterable[float]) -> None:
        """Continue from the measurements of an earlier process."""
        self._found.extend(min(each, LONGEST_S) for each in measured_s)

    def observe(self, pool: PoolObserved, now: float) -> None:
        """Note the pool's state at monotonic time `now`. Workers become ready in launch order."""
        risen = 0 if self._ready is None else pool.ready - self._ready
        for _ in range(min(max(risen, 0), len(self._launched))):
            self._found.append(min(max(now - self._launched.popleft(), 0.0), LONGEST_S))
        while len(self._launched) > pool.starting:
            # Launches that were cancelled or failed: the newest ones first, as the pool's core cancels.
            self._launched.pop()
        self._launched.extend([now] * (pool.starting - len(self._launched)))
        self._ready = pool.ready

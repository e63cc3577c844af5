"""Limits of a copy's time: derived from the state's size and the measured transfer rate, within bounds.

Three parties wait for a copy, each longer than the one before:

1. the target (`CopyRate.limit_s`, which it announces),
2. the source (`LATER_S` longer),
3. the scheduler, which adds its own margin to the target's limit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from cachetools import LRUCache

LATER_S = 2.0
"""Time by which a source waits longer than its target announced, seconds."""
SLACK = 4.0
"""Factor on the time to send the state once: a copy has several rounds, and the network is shared."""
COPIES_KEPT = 8
"""Number of copies kept per host. The slowest of them counts."""
HOSTS_KEPT = 256


@dataclass(frozen=True)
class CopyLimits:
    """Bounds of a copy, in seconds and bytes."""

    least_s: float = 20.0
    """Time added for a state of any size, seconds: the handoff waits for an idle window."""
    most_s: float = 3_600.0
    bytes_per_s: float = 10e6
    """Assumed transfer rate before one is measured, bytes per second."""
    still_s: float = 20.0
    """Longest time for which a watched session may be quiesced, seconds."""


class CopyRate:
    """Transfer rates of recent copies by host. No failure shortens the next limit."""

    def __init__(self, limits: CopyLimits) -> None:
        self._limits = limits
        self._measured: LRUCache[str, deque[float]] = LRUCache(HOSTS_KEPT)

    def limit_s(self, host: str, size: int) -> float:
        """Time limit for a state of `size` bytes from this host, seconds."""
        limits, measured = self._limits, self._measured.get(host)
        pace = min(measured) if measured else limits.bytes_per_s
        return min(limits.most_s, limits.least_s + SLACK * size / pace)

    def took(self, host: str, size: int, seconds: float) -> None:
        """Record a copy of `size` bytes from this host in `seconds`."""
        if size > 0 and seconds > 0:
            self._measured.setdefault(host, deque(maxlen=COPIES_KEPT)).append(size / seconds)

    def forget(self, host: str) -> None:
        """After a failed copy, drop the host's rates if they exceed the assumed rate: they may be wrong."""
        if min(self._measured.get(host, ()), default=0.0) > self._limits.bytes_per_s:
            del self._measured[host]

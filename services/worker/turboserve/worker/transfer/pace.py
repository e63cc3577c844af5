"""How long a copy may take: what the state's size and the pace of its way make of it, within bounds.

Three wait for a copy, and each longer than the one before: its target (`CopyRate.limit_s`, and it says so),
its source (`LATER_S` more), and the scheduler, which adds a margin of its own to what the target says.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

LATER_S = 2.0
"""A source gives up so much later than its target said that it would."""
SLACK = 4.0
"""A copy may take so many times as long as moving its state once does: there are several rounds, and others
may be using the same way."""
COPIES_KEPT = 8
"""Of each host the slowest of the latest so many counts."""
HOSTS_KEPT = 256


@dataclass(frozen=True)
class CopyLimits:
    """Bounds of a copy. Seconds, bytes."""

    least_s: float = 20.0
    """For however small a state: a good moment has to come, too."""
    most_s: float = 3_600.0
    bytes_per_s: float = 10e6
    """Taken for the pace of a way that was not measured yet."""
    still_s: float = 20.0
    """A session that somebody watches stands still for no longer."""


class CopyRate:
    """What copies from each host took of late. No failure makes the next limit shorter."""

    def __init__(self, limits: CopyLimits) -> None:
        self._limits = limits
        self._measured: OrderedDict[str, deque[float]] = OrderedDict()

    def limit_s(self, host: str, size: int) -> float:
        """For a state of `size` bytes from there."""
        limits, measured = self._limits, self._measured.get(host)
        pace = min(measured) if measured else limits.bytes_per_s
        return min(limits.most_s, limits.least_s + SLACK * size / pace)

    def took(self, host: str, size: int, seconds: float) -> None:
        """So many bytes have come from there in that time."""
        if size > 0 and seconds > 0:
            self._measured.setdefault(host, deque(maxlen=COPIES_KEPT)).append(size / seconds)
            self._measured.move_to_end(host)
            while len(self._measured) > HOSTS_KEPT:
                self._measured.popitem(last=False)

    def forget(self, host: str) -> None:
        """A copy from there failed: that it was faster than is assumed of any way may be what was wrong."""
        if min(self._measured.get(host, ()), default=0.0) > self._limits.bytes_per_s:
            del self._measured[host]

"""L(n): chunk latency by the number of sessions on a worker, from its measured profile."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

CHUNK_S = 0.75
"""Playing time of a chunk in seconds; also the assumed chunk latency of a full worker without a profile."""


class LatencyCurve:
    """Seconds of a chunk by number of sessions. The curve never falls, and L(0) is 0.

    - Between measured sizes, the curve is linear.
    - Beyond them, it continues with the last slope, or in proportion if there is only one measurement.
    - Without measurements, L(n) is n / `capacity` of `CHUNK_S`, so that unequal workers fill in proportion.
    """

    __slots__ = ("_measured", "_seconds", "measured")

    def __init__(self, profile: Mapping[int, float], capacity: int) -> None:
        self.measured = bool(profile)
        self._measured = sorted(profile.items()) or [(max(capacity, 1), CHUNK_S)]
        if not profile:
            self._measured.insert(0, (0, 0.0))
        self._seconds = [0.0]

    def __call__(self, sessions: int) -> float:
        seconds = self._seconds
        while len(seconds) <= sessions:
            seconds.append(max(seconds[-1], self._at(len(seconds))))
        return seconds[sessions]

    def most(self, limit_s: float, up_to: int) -> int:
        """Return the largest n ≤ `up_to` with L(n) ≤ `limit_s`."""
        self(up_to)
        return max(0, bisect.bisect_right(self._seconds, limit_s, 0, up_to + 1) - 1)

    def _at(self, sessions: int) -> float:
        measured = self._measured
        at = bisect.bisect_left(measured, (sessions,))
        if at < len(measured) and (measured[at][0] == sessions or at == 0):
            return measured[at][1]
        if len(measured) == 1:
            return measured[0][1] * sessions / max(measured[0][0], 1)
        (low, low_s), (high, high_s) = measured[at - 1 : at + 1] if at < len(measured) else measured[-2:]
        slope = (high_s - low_s) / (high - low)
        if at == len(measured):
            slope = max(slope, 0.0)
        return low_s + slope * (sessions - low)


def slots(curve: LatencyCurve, capacity: int, target_s: float | None) -> int:
    """Return K: the sessions within `capacity` whose chunk latency is at most `target_s`; at least one.

    Without `target_s` or without measurements, K is `capacity`.
    """
    if target_s is None or capacity <= 1 or not curve.measured:
        return max(capacity, 0)
    return max(1, curve.most(target_s, capacity))

"""Gather policies that lost against the worker's own (`LeastCreditFirst`)."""

from __future__ import annotations

from collections.abc import Sequence

from turboserve.worker.engine.gather import Candidate, alike
from turboserve.worker.engine.profile import LatencyProfile


class FirstComeFirstServed:
    """One session at a time, whole chunks, in the order in which they became due."""

    def gather(self, ready: Sequence[Candidate], profile: LatencyProfile, limit: int) -> list[Candidate]:
        """See `GatherPolicy.gather`."""
        if not ready:
            return []
        return [max(ready, key=lambda c: (c.step > 0, c.waiting_s))]


class CoalescedChunks:
    """All ready sessions start a chunk together and stay together to its end (TurboServe, 3.1)."""

    def gather(self, ready: Sequence[Candidate], profile: LatencyProfile, limit: int) -> list[Candidate]:
        """See `GatherPolicy.gather`."""
        if not ready:
            return []
        started = [c for c in ready if c.step > 0]
        # Rows that began together are at one step; a smaller step is a batch that began later by exception.
        pool = [c for c in started if c.step == max(s.step for s in started)] if started else list(ready)
        pool.sort(key=lambda c: -c.waiting_s)
        return alike(pool)[:limit]

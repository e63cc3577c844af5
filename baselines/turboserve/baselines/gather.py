"""Gather policies that performed worse than the worker's own (`LeastCreditFirst`)."""

from __future__ import annotations

from collections.abc import Sequence

from turboserve.worker.engine.gather import Candidate, LatencyProfile, alike


class FirstComeFirstServed:
    """Runs one session at a time, a whole chunk each, in the order in which sessions became ready."""

    def gather(self, ready: Sequence[Candidate], profile: LatencyProfile, limit: int) -> list[Candidate]:
        """See `GatherPolicy.gather`."""
        if not ready:
            return []
        return [max(ready, key=lambda c: (c.step > 0, c.waiting_s))]


class CoalescedChunks:
    """Starts a chunk of all ready sessions together and keeps them together to its end (TurboServe, 3.1)."""

    def gather(self, ready: Sequence[Candidate], profile: LatencyProfile, limit: int) -> list[Candidate]:
        """See `GatherPolicy.gather`."""
        if not ready:
            return []
        started = [c for c in ready if c.step > 0]
        # Sessions that began together are at the same step. A lower step belongs to a batch that began later.
        pool = [c for c in started if c.step == max(s.step for s in started)] if started else list(ready)
        pool.sort(key=lambda c: -c.waiting_s)
        return alike(pool)[:limit]

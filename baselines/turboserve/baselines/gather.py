"""Gather policies to compare the worker's own with (`LeastCreditFirst`)."""

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


class TierQueue:
    """Runs one session at a time by its tier, then by least credit, and chooses again after each forward.

    A session is urgent if its credit is below α T, relaxed if it is above 2 α T, and normal otherwise. T is
    the time of all forwards of its present chunk alone, α the worker's. Source: SlackServe, 4.1.
    """

    def gather(self, ready: Sequence[Candidate], profile: LatencyProfile, limit: int) -> list[Candidate]:
        """See `GatherPolicy.gather`."""
        if not ready:
            return []
        alone = profile(1)
        return [min(ready, key=lambda c: (self._tier(c, alone), c.credit_s))]

    def _tier(self, candidate: Candidate, alone: float) -> int:
        """Return 0 for urgent, 1 for normal, 2 for relaxed."""
        urgent_s = candidate.alpha * (candidate.step + candidate.steps_left) * alone
        return (candidate.credit_s >= urgent_s) + (candidate.credit_s > 2 * urgent_s)


class EarliestStream:
    """Runs one session at a time, a whole chunk each: the one whose video must be whole first.

    A stream's deadline is when its viewer has played what is delivered and the rest of the video. Sessions
    without an end come last, the longest wait first. Source: TridentServe, whose requests have one deadline
    each.
    """

    def gather(self, ready: Sequence[Candidate], profile: LatencyProfile, limit: int) -> list[Candidate]:
        """See `GatherPolicy.gather`."""
        if not ready:
            return []
        return [min(ready, key=lambda c: (c.step == 0, c.slack_s + c.left_s, -c.waiting_s))]

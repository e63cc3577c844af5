"""NeuStream's gather policies, for chunks of sessions instead of requests (sections 4.1 and 5)."""

from __future__ import annotations

from collections.abc import Sequence

from turboserve.worker.engine.gather import Candidate, LatencyProfile, alike


class PartialDeadlines:
    """As many sessions as end within a partial deadline, in the order of arrival (Algorithm 1).

    A chunk's deadline is when its viewer has no video left. Its forwards divide the time from when it became
    due until then equally: each has a partial SLO. The batch is the largest one whose forward ends within the
    smallest partial SLO of its rows.

    - A chunk's budget counts the present forward too: B = (steps done + 1) × partial SLO − time since due.
      NeuStream counts the visits before the present one alone, by which a first forward is always late.
    - NeuStream drops a request without budget. A chunk cannot be dropped: it goes to a queue of lower
      priority, which only runs while no other chunk is ready.
    """

    def gather(self, ready: Sequence[Candidate], profile: LatencyProfile, limit: int) -> list[Candidate]:
        """See `GatherPolicy.gather`."""
        if not ready:
            return []
        live = [c for c in ready if (c.step + 1) * _partial_slo_s(c) > c.waiting_s]
        pool = alike(sorted(live or ready, key=lambda c: (-c.waiting_s, -c.step)))[:limit]
        if not live:
            return pool
        batch = pool[:1]
        least_s = _partial_slo_s(batch[0])
        for candidate in pool[1:]:
            slo_s = min(least_s, _partial_slo_s(candidate))
            if profile(len(batch) + 1) <= slo_s:
                batch.append(candidate)
                least_s = slo_s
        return batch


class EarliestFluidFinish:
    """The sessions whose forwards would end first if each had an equal share of the device (EFTF, section 5).

    In fluid sharing, n sessions with a share of 1 / n each take n L(1) for a forward. A chunk's forwards
    follow each other from when it became due. So the forward after `step` others ends `(step + 1) n L(1) -
    waiting_s` from now. Those with the earliest end run on the whole device, as many as pay.
    """

    def gather(self, ready: Sequence[Candidate], profile: LatencyProfile, limit: int) -> list[Candidate]:
        """See `GatherPolicy.gather`."""
        if not ready:
            return []
        share_s = len(ready) * profile(1)
        pool = alike(sorted(ready, key=lambda c: (c.step + 1) * share_s - c.waiting_s))
        return pool[: profile.best_batch(min(limit, len(pool)))]


def _partial_slo_s(candidate: Candidate) -> float:
    """Partial SLO of one forward of the candidate's chunk, seconds. Not above 0: the chunk is late."""
    return (candidate.waiting_s + candidate.slack_s) / (candidate.step + candidate.steps_left)

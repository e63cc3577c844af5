"""Which sessions go into the next forward. Pure: candidates in, batch out.

The three policies share one interface, so that a baseline differs from the default in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from turboserve.worker.engine.profile import LatencyProfile


@dataclass(frozen=True)
class Candidate:
    """One session's next forward."""

    session: str
    frames: int
    """Latent frames of the forward; a batch has equally many in all rows."""
    step: int
    """Forwards of this chunk already done."""
    steps_left: int
    """Forwards until the chunk is done, this one included."""
    waiting_s: float
    """Seconds since the chunk became due."""
    slack_s: float
    """Playout slack: seconds of video that the viewer has left."""
    credit_s: float
    """Service credit: playout slack less the time to finish this chunk and to make the next (SlackServe,
    3.1)."""


class GatherPolicy(Protocol):
    """Picks a batch. Never more than `limit` rows, never rows of different frame counts, never nothing of
    something."""

    def gather(self, ready: Sequence[Candidate], profile: LatencyProfile, limit: int) -> list[Candidate]:
        """Return the batch, a subset of `ready` without repetition; empty only if `ready` is."""
        ...


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
        return _alike(pool)[:limit]


class LeastCreditFirst:
    """Any sessions at any steps: least service credit first, as many as the profile says pay."""

    def __init__(self, aging: float = 0.25) -> None:
        """`aging`: seconds of credit that a second of waiting is worth, so that nobody waits for ever."""
        self._aging = aging

    def gather(self, ready: Sequence[Candidate], profile: LatencyProfile, limit: int) -> list[Candidate]:
        """See `GatherPolicy.gather`."""
        if not ready:
            return []
        pool = _alike(sorted(ready, key=lambda c: (c.credit_s - self._aging * c.waiting_s, -c.step)))
        size = min(len(pool), profile.best_batch(min(limit, len(pool))))
        while size > 1 and not self._in_time(pool[:size], profile):
            size -= 1
        return pool[:size]

    @staticmethod
    def _in_time(batch: Sequence[Candidate], profile: LatencyProfile) -> bool:
        """Whether the batch's size itself makes no row late that would be in time alone."""
        together, alone = profile(len(batch)), profile(1)
        return all(c.steps_left * together <= c.slack_s for c in batch if c.steps_left * alone <= c.slack_s)


def policy(name: str) -> GatherPolicy:
    """The policy of this name: fcfs, chunk or step. Raises `ValueError` for any other."""
    policies: dict[str, Callable[[], GatherPolicy]] = {
        "fcfs": FirstComeFirstServed,
        "chunk": CoalescedChunks,
        "step": LeastCreditFirst,
    }
    if name not in policies:
        raise ValueError(f"gather policy: {name!r} is not one of {', '.join(policies)}")
    return policies[name]()


def _alike(ordered: Sequence[Candidate]) -> list[Candidate]:
    """Those with as many frames as the first, in order."""
    return [c for c in ordered if c.frames == ordered[0].frames]

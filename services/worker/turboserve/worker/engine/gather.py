"""Which sessions go into the next forward, or are decoded next. Pure: candidates in, batch out.

The three policies share one interface, so that a baseline differs from the default in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from turboserve.worker.engine.profile import LatencyProfile


@dataclass(frozen=True)
class Candidate:
    """One session's next forward, or its next turn of another stage: then that is its only step."""

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
    begins: bool = False
    """Whether it comes without the cache that the others have; a batch has only such rows or none."""


_GAIN = 0.8
"""Found by simulating profiles from those that batch well to those that do not, at loads of 0.2 to 0.9."""
_LEAST_GAIN = 0.05


class GatherPolicy(Protocol):
    """Picks a batch. Never more than `limit` rows, never rows that are not alike (`frames`, `begins`), never
    nothing of something."""

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
    """Any sessions at any steps: least service credit first, as many as the profile says pay.

    The credit counts as it stood when the chunk was begun: what a chunk gained by its own forwards does not
    cost it its turn, which would make every chunk finish late. A batch is smaller than what pays if that
    saves everybody who can be saved: so it never runs past the tightest slack while no one else pays for it.
    Where somebody will be late at any size, throughput is what helps the rest.
    """

    def __init__(self, aging: float = 0.25) -> None:
        """`aging`: seconds of credit that a second of waiting is worth, so that nobody waits for ever."""
        self._aging = aging

    def gather(self, ready: Sequence[Candidate], profile: LatencyProfile, limit: int) -> list[Candidate]:
        """See `GatherPolicy.gather`."""
        if not ready:
            return []
        alone = profile(1)
        pool = _alike(sorted(ready, key=lambda c: (self._turn(c, alone), -c.step)))
        size = profile.best_batch(min(limit, len(pool)), self._gain(len(pool)))
        if size == 1 or _in_time(pool[:size], profile(size)) == _in_time(pool[:size], alone):
            return pool[:size]
        savable = _in_time(pool, alone)
        for smaller in range(size - 1, 0, -1):
            if _in_time(pool, profile(smaller), smaller) >= savable:
                return pool[:smaller]
        return pool[:size]

    @staticmethod
    def _gain(ready: int) -> float:
        """Share of a row's throughput that a row of a batch must add.

        Where a batch is hardly faster than its rows one by one, joining only makes the chunk in work later.
        With few ready that is all it does; with many, throughput is what keeps everybody from waiting.
        """
        return max(_LEAST_GAIN, _GAIN / ready)

    def _turn(self, candidate: Candidate, alone: float) -> float:
        begun = candidate.steps_left * alone if candidate.step else 0.0
        return candidate.credit_s + begun - self._aging * candidate.waiting_s


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
    """Those with as many frames as the first, and a cache if that has one, in order."""
    first = ordered[0]
    return [c for c in ordered if (c.frames, c.begins) == (first.frames, first.begins)]


def _in_time(ordered: Sequence[Candidate], seconds: float, size: int | None = None) -> int:
    """How many finish within their slack if `size` at a time, or all at once, go through forwards of
    `seconds`."""
    turns = size or max(1, len(ordered))
    return sum(c.steps_left * seconds * (1 + place // turns) <= c.slack_s for place, c in enumerate(ordered))

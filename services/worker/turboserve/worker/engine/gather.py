"""Which sessions go into the next forward, or are decoded next. Pure: candidates in, batch out.

All policies share one interface, so that a baseline differs from the default in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from turboserve.policies import Policies
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
        pool = alike(sorted(ready, key=lambda c: (self._turn(c, alone), -c.step)))
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


GATHER_POLICIES: Policies[GatherPolicy] = Policies("gather", {"step": LeastCreditFirst})
"""By the name that the settings use."""


def alike(ordered: Sequence[Candidate]) -> list[Candidate]:
    """Those with as many frames as the first, and a cache if that has one, in order."""
    first = ordered[0]
    return [c for c in ordered if (c.frames, c.begins) == (first.frames, first.begins)]


def _in_time(ordered: Sequence[Candidate], seconds: float, size: int | None = None) -> int:
    """How many finish within their slack if `size` at a time, or all at once, go through forwards of
    `seconds`."""
    turns = size or max(1, len(ordered))
    return sum(c.steps_left * seconds * (1 + place // turns) <= c.slack_s for place, c in enumerate(ordered))

"""Policies that choose the sessions of the next forward or decode. Pure: candidates in, batch out.

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
    """One session's next forward. A candidate of another stage has only one step."""

    session: str
    frames: int
    """Latent frames of the forward, equal in all rows of a batch."""
    step: int
    """Number of forwards of this chunk already done."""
    steps_left: int
    """Number of forwards until the chunk is done, this one included."""
    waiting_s: float
    """Seconds since the chunk became due."""
    slack_s: float
    """Playout slack: seconds of video that the viewer has left."""
    credit_s: float
    """Service credit: playout slack less the time for the rest of this chunk and for the next (SlackServe,
    3.1)."""
    begins: bool = False
    """Whether the row has no cache yet. Either all or none of a batch's rows have a cache."""


_GAIN = 0.8
"""Found by simulating profiles that batch well and profiles that do not, at loads of 0.2 to 0.9."""
_LEAST_GAIN = 0.05


class GatherPolicy(Protocol):
    """Chooses a batch: at most `limit` rows, equal in `frames` and `begins`; at least one if any is ready."""

    def gather(self, ready: Sequence[Candidate], profile: LatencyProfile, limit: int) -> list[Candidate]:
        """Return the batch, a subset of `ready` without repetition; empty only if `ready` is."""
        ...


class LeastCreditFirst:
    """Any sessions at any steps: least service credit first, as many as the profile says pay.

    The order ignores a chunk's own progress. Otherwise a chunk would lose its turn by its forwards, and every
    chunk would finish late.

    If the size that pays delays a session that could be in time, the batch is the largest smaller one that
    delays no such session. If no size achieves that, the batch keeps the size that pays: throughput helps the
    other sessions most.
    """

    def __init__(self, aging: float = 0.25) -> None:
        """`aging`: seconds of credit per second of waiting, so that no session waits forever."""
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
        """Share of a row's throughput that a further row of a batch must add.

        Where a batch is hardly faster than its rows one by one, joining only delays the chunk in progress.
        With few ready rows that is the only effect; with many, throughput keeps sessions from waiting.
        """
        return max(_LEAST_GAIN, _GAIN / ready)

    def _turn(self, candidate: Candidate, alone: float) -> float:
        begun = candidate.steps_left * alone if candidate.step else 0.0
        return candidate.credit_s + begun - self._aging * candidate.waiting_s


GATHER_POLICIES: Policies[GatherPolicy] = Policies("gather", {"step": LeastCreditFirst})
"""Policies by the name that the settings use."""


def alike(ordered: Sequence[Candidate]) -> list[Candidate]:
    """The candidates with the `frames` and `begins` of the first, in order."""
    first = ordered[0]
    return [c for c in ordered if (c.frames, c.begins) == (first.frames, first.begins)]


def _in_time(ordered: Sequence[Candidate], seconds: float, size: int | None = None) -> int:
    """Number of candidates that finish within their slack, if `size` at a time (default: all at once) go
    through forwards of `seconds`."""
    turns = size or max(1, len(ordered))
    return sum(c.steps_left * seconds * (1 + place // turns) <= c.slack_s for place, c in enumerate(ordered))

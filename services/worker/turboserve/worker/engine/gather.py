"""Policies that choose the sessions of the next forward or decode, and the latency profiles they decide by.

All policies share one interface, so that a baseline differs from the default in nothing else.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from turboserve.policies import Policies
from turboserve.static_frozen import statically_frozen

ALPHA = 2.0
"""Width of a tier, as a multiple of T (SlackServe, 3.1)."""
_OUTLIER = 3.0
"""Factor above or below the expected value beyond which a sample tells about the machine, not the stage."""
_CONVINCED = 5
"""Number of outliers of a size in a row after which they are accepted."""
_WEIGHT = 0.1
"""Share of a new sample in the running mean."""
_STALE = 200
"""Number of samples of other sizes after which a size is measured again: its value may have been noise."""
_MISSING = 10
"""Number of samples of a size at lower configurations, with none at the best one between them, after which
further ones count. A mean forgets as many: those at the best configuration, where they come, count alone."""
_WARM_UP = 2
"""Number of first samples of a batch size that only warm caches, allocators and compilers."""


class LatencyProfile:
    """L(b), a stage's measured seconds by batch size (NeuStream, 4.1), refined while the stage runs.

    Linear between measured sizes, extrapolated above, constant below.

    One thread may observe while others read.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        """`seconds`: measurements by batch size. Without any, every size is unknown (0 seconds)."""
        self._seconds = dict(sorted((seconds or {}).items()))
        self._seen: dict[int, int] = {}
        self._samples = 0
        """Number of samples of all sizes."""
        self._seen_at: dict[int, int] = dict.fromkeys(self._seconds, 0)
        """Size → `_samples` when it was measured last."""
        self._outliers: dict[int, int] = {}
        self._lowered: dict[int, int] = {}
        """Size → number of samples at lower configurations since the last one at the best."""
        self._estimates: dict[int, float] = {}
        """Seconds of sizes that were not measured. Replaced when `_seconds` changes, as `_paying` is."""
        self._paying: dict[tuple[int, float], int] = {}
        """Results of `paying_batch`: a forecast asks for each of its turns."""

    def __call__(self, batch: int) -> float:
        """L(batch) in seconds; 0.0 while nothing is known."""
        estimates = self._estimates
        if (measured := self._seconds.get(batch)) is not None:
            return measured
        estimate = estimates.get(batch)
        if estimate is None:
            estimate = estimates[batch] = self._estimate(batch)
        return estimate

    def _estimate(self, batch: int) -> float:
        known = self._seconds
        sizes = list(known)
        if not sizes or batch < 1:
            return 0.0
        at = bisect.bisect_left(sizes, batch)
        if at == 0:
            return known[sizes[0]]
        if at < len(sizes):
            low, high = sizes[at - 1], sizes[at]
            share = (batch - low) / (high - low)
            return known[low] + share * (known[high] - known[low])
        last = sizes[-1]
        slope = known[last] / last
        if len(sizes) > 1:
            slope = max(0.0, (known[last] - known[sizes[-2]]) / (last - sizes[-2]))
        return known[last] + slope * (batch - last)

    def observe(self, batch: int, seconds: float) -> None:
        """Add a sample, unless it is one of a size's first samples or an outlier."""
        self._lowered[batch] = 0
        self._samples += 1
        self._seen_at[batch] = self._samples
        self._seen[batch] = seen = self._seen.get(batch, 0) + 1
        if seen > _WARM_UP:
            self._add(batch, seconds)

    def observe_lowered(self, batch: int, seconds: float, share: float) -> None:
        """Add a sample at a lower configuration, if samples at the best one are missing (`_MISSING`).

        `share`: time of the batch, relative to one of that size at the best configuration. On this device
        the ratio may differ. Its error reaches L(b) only while there are no samples that have none.
        """
        self._lowered[batch] = lowered = self._lowered.get(batch, 0) + 1
        if lowered > _MISSING:
            self._samples += 1
            self._seen_at[batch] = self._samples
            self._add(batch, seconds / share)

    def _add(self, batch: int, seconds: float) -> None:
        known = self._seconds.get(batch)
        if known is None:
            self._set(batch, seconds)
        elif known / _OUTLIER <= seconds <= known * _OUTLIER:
            changed = known + _WEIGHT * (seconds - known)
            if changed != known:
                self._seconds[batch] = changed
                self._forget()
            self._outliers[batch] = 0
        else:
            self._outliers[batch] = self._outliers.get(batch, 0) + 1
            if self._outliers[batch] >= _CONVINCED:
                self._set(batch, seconds)
                self._outliers[batch] = 0

    def _set(self, batch: int, seconds: float) -> None:
        known = self._seconds
        if batch in known:
            known[batch] = seconds
        else:
            # Replace the dictionary: a reader on another thread keeps the old sizes.
            self._seconds = dict(sorted({**known, batch: seconds}.items()))
        self._forget()

    def _forget(self) -> None:
        # New dictionaries: what a reader on another thread adds to the old ones may be of the old seconds.
        self._estimates, self._paying = {}, {}

    def best_batch(self, limit: int, gain: float = 0.05) -> int:
        """Largest size up to `limit` to which each further row adds at least `gain` of a row's throughput.

        A batch of b pays against a smaller one of a when b / L(b) is at least a / L(a) times 1 + `gain` · (b
        − a) / b. All sizes are compared, not only neighbors: measured latencies are not smooth, and one size
        that does not pay says nothing about the next.

        A size that was not measured for long is tried once, and again after as many samples; otherwise a bad
        sample would count forever. The size after the best is tried if it is beyond all measured ones.
        """
        for size in self._seconds:
            if size <= limit and self._samples - self._seen_at.get(size, 0) > _STALE:
                # Reset even if the batch does not get this size: the caller may choose fewer rows.
                self._seen_at[size] = self._samples
                return size
        best = self.paying_batch(limit, gain)
        return best + 1 if best < limit and best + 1 > max(self._seconds, default=0) else best

    def paying_batch(self, limit: int, gain: float = 0.05) -> int:
        """`best_batch` by what is measured so far, without trying a size."""
        paying = self._paying
        best = paying.get((limit, gain))
        if best is None:
            best = 1
            for size in range(2, limit + 1):
                if self._pays(best, size, gain):
                    best = size
            paying[limit, gain] = best
        return best

    def _pays(self, smaller: int, larger: int, gain: float) -> bool:
        now, then = self(smaller), self(larger)
        return now <= 0 or larger / then >= smaller / now * (1 + gain * (larger - smaller) / larger)

    def copy(self) -> LatencyProfile:
        """A profile of the same latencies that counts its own samples."""
        return LatencyProfile(self._seconds)

    def to_mapping(self) -> dict[int, float]:
        """Seconds by batch size, for a profile file."""
        return dict(self._seconds)


@statically_frozen()
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
    left_s: float = math.inf
    """Seconds of video from the end of what is delivered to the session's end; infinite if it has none."""
    alpha: float = ALPHA
    """Width of the worker's tiers, as a multiple of T."""


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
        if limit == 1:
            return [min(ready, key=lambda c: (self._turn(c, alone), -c.step))]
        pool = alike(sorted(ready, key=lambda c: (self._turn(c, alone), -c.step)))
        size = profile.best_batch(min(limit, len(pool)), gain_of(len(pool)))
        if size == 1 or _in_time(pool[:size], profile(size)) == _in_time(pool[:size], alone):
            return pool[:size]
        savable = _in_time(pool, alone)
        for smaller in range(size - 1, 0, -1):
            if _in_time(pool, profile(smaller), smaller) >= savable:
                return pool[:smaller]
        return pool[:size]

    def _turn(self, candidate: Candidate, alone: float) -> float:
        begun = candidate.steps_left * alone if candidate.step else 0.0
        return candidate.credit_s + begun - self._aging * candidate.waiting_s


GATHER_POLICIES: Policies[GatherPolicy] = Policies("gather", {"step": LeastCreditFirst})
"""Policies by the name that the settings use."""


def gain_of(ready: int) -> float:
    """Share of a row's throughput that a further row of a batch must add, if so many rows are ready.

    Where a batch is hardly faster than its rows one by one, joining only delays the chunk in progress. With
    few ready rows that is the only effect; with many, throughput keeps sessions from waiting.
    """
    return max(_LEAST_GAIN, _GAIN / ready)


def alike(ordered: Sequence[Candidate]) -> list[Candidate]:
    """The candidates with the `frames` and `begins` of the first, in order."""
    first = ordered[0]
    return [c for c in ordered if (c.frames, c.begins) == (first.frames, first.begins)]


def _in_time(ordered: Sequence[Candidate], seconds: float, size: int | None = None) -> int:
    """Number of candidates that finish within their slack, if `size` at a time (default: all at once) go
    through forwards of `seconds`."""
    turns = size or max(1, len(ordered))
    return sum(c.steps_left * seconds * (1 + place // turns) <= c.slack_s for place, c in enumerate(ordered))

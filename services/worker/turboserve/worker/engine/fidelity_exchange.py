"""The exchange of quality for time among the chunks of one worker. Pure arithmetic.

First it exchanges quality for time in the order of the deadlines (as Moore and Hodgson's algorithm drops late
jobs): a chunk that would be late lowers those before it which lose the least quality for each second. Then it
gives quality back where that makes no chunk late. In a small plan, it also changes several chunks at once
(`fidelity_swap`).

Where nothing can change, arrays answer that without a pass over the chunks. A pass covers only the deadlines
from the first to the last that an exchange can help. `turboserve.experiments.slack.reference` has the same
rules without these shortcuts; a test compares both.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from turboserve.worker.engine.fidelity_forecast import LATE_S, Bools, ChunkQueue, Floats, Ints
from turboserve.worker.engine.fidelity_swap import SWAPS, best_swap

MARGIN = 0.25
"""Time by which a chunk must be early, as a share of a chunk's time at the best configuration."""
LEAD_SHARE = 0.5
"""Largest margin above `MARGIN`, as a share of the time by which a chunk can be early at all. With a short
lead it may begin late, and is never early by its whole time."""
ROUNDS = 8
"""Largest number of passes over the deadlines."""
REFINE_LIMIT = 96
"""Largest product of chunks and lowered chunks with which a plan tries to spare them one by one. In a larger
plan one chunk weighs less than that costs."""
GAIN_THRESHOLDS = (1.0, 0.5, 0.25, 0.0)
"""Least gain of quality that each pass of `give_back` accepts, as a share of the largest gain."""
MULTI_PASS_CHUNKS = 48
"""Largest number of chunks for whose plan `give_back` makes all passes. A larger plan gets only the last."""


class QualityExchange:
    """The configurations of the chunks of a queue."""

    def __init__(self, queue: ChunkQueue, caps: Ints, margin: float) -> None:
        """Begin with every chunk at its highest configuration.

        `caps`: highest place of each session's next chunk, in the order of `EngineLoad.streams`. `margin`:
        see `MARGIN`.
        """
        self._queue, load = queue, queue.load
        self._steps = load.ladder.steps
        self._qualities = [rung.quality for rung in load.ladder.rungs]
        newest = queue.newest[queue.stream]
        self._newest = np.where(queue.next, newest, len(self._qualities))
        self._highest = np.where(queue.fixed, newest, np.where(queue.next, caps[queue.stream], 0))
        self._lowest = queue.lowest
        self.place: Ints = self._highest
        """Place of each chunk's configuration on the ladder."""
        best, alone_s = load.ladder.best.forwards, load.forward(1)
        wanted_s, least_s = margin * best * alone_s, min(margin, MARGIN) * best * alone_s
        possible_s = LEAD_SHARE * (queue.lead_s - (load.after_s + best * queue.row_s))
        self._limit_s: Floats = queue.due_s - np.maximum(least_s, np.minimum(wanted_s, possible_s)) + LATE_S

    def run(self, only: int | None = None) -> None:
        """Lower chunks until none is late that can be in time, with the least loss of quality.

        `only`: the caller uses this chunk's configuration only. Then others may be left lower than needed.
        """
        if not np.any(self._queue.ready_s(self._forwards(self.place)) > self._limit_s):
            return
        self._lower()
        few = len(self._queue) <= max(MULTI_PASS_CHUNKS, REFINE_LIMIT)
        if few or only is None or self.place[only] > self._highest[only]:
            self._give_back(None if few else only)
        if few:
            self._refine()
            self._swap()

    def _forwards(self, place: Ints) -> Floats:
        queue = self._queue
        forwards: Floats = np.where(queue.fixed, queue.forwards, self._steps.forwards[place])
        return forwards

    def _work_s(self) -> Floats:
        work_s: Floats = self._forwards(self.place) * self._queue.pace_s
        return work_s

    def _lower(self) -> None:
        for _ in range(ROUNDS):
            # Lowering a chunk wins less where later chunks then wait to begin: look again.
            if not self._lower_once():
                return

    def _lower_once(self) -> bool:
        """Lower chunks in one pass over the deadlines. Return whether any was lowered."""
        changed = self._lower_alone()
        work_s = self._work_s()
        done_s = self._queue.done_s(work_s)
        late = done_s > self._limit_s
        if not late.any():
            return changed
        # Where the device waits, no chunk before makes a later one earlier.
        start = _last(self._waits(done_s))
        lowerable = self.place < self._lowest
        count = np.cumsum(lowerable)
        helps = np.flatnonzero(late & (count > (count - lowerable)[start]))
        if not len(helps):
            return changed
        first, last = int(helps[0]), int(helps[-1])
        begin = int(start[first])
        self._exchange(begin, first, last, work_s, done_s)
        return True

    def _lower_alone(self) -> bool:
        """Lower the chunks that would be late alone. Return whether any was lowered."""
        changed = False
        while True:
            soonest_s = self._queue.soonest_s(self._forwards(self.place))
            late = (soonest_s > self._limit_s) & (self.place < self._lowest)
            if not late.any():
                return changed
            changed = True
            self.place = np.where(late, self._steps.below[self._lowest, self.place], self.place)

    def _waits(self, done_s: Floats) -> Bools:
        """Before which chunks the device waits."""
        waits = np.zeros(len(done_s), bool)
        waits[1:] = self._queue.begins_s[1:] > done_s[:-1]
        return waits

    def _exchange(self, begin: int, first: int, last: int, work_s: Floats, done_s: Floats) -> None:
        """Lower chunks from `begin` on in the order of the deadlines `first` to `last`."""
        here = slice(begin, last + 1)
        lowest, newest, size = self._lowest[here], self._newest[here], last + 1 - begin
        begins_s, limit_s = self._queue.begins_s[here], self._limit_s[here]
        floor_s = self._forwards(self._lowest)[here] * self._queue.pace_s
        hopeless, time = self._hopeless(float(done_s[begin] - work_s[begin]), floor_s, begins_s, limit_s)
        places = self.place[here].copy()
        places[:hopeless] = lowest[:hopeless]
        ranks = self._steps.rank[lowest, newest, places]
        # The step down of each chunk as one number: the rank of its loss, then the chunk's index.
        keys = np.where(places < lowest, ranks * size + np.arange(size), -1)
        at = hopeless
        offers: list[int] = []
        if not hopeless:
            at = first - begin
            offers = sorted(key for key in keys[:at].tolist() if key >= 0)
            time = float(done_s[first] - work_s[first])
        place, below, rank = places.tolist(), self._steps.below.tolist(), self._steps.rank.tolist()
        low, new = lowest.tolist(), newest.tolist()
        cost_s = (self._steps.forwards * self._queue.pace_s).tolist()
        rest = (each[at:].tolist() for each in (begins_s, work_s[here], limit_s, keys))
        for begins, work, limit, key in zip(*rest, strict=True):
            if time < begins:
                time = begins
                offers.clear()
            time += work
            if key >= 0:
                heappush(offers, key)
            while time > limit and offers:
                k = heappop(offers) % size
                above, lowest_k = place[k], low[k]
                place[k] = under = below[lowest_k][above]
                time -= cost_s[above] - cost_s[under]
                if under < lowest_k:
                    heappush(offers, rank[lowest_k][new[k]][under] * size + k)
        self.place = self.place.copy()
        self.place[here] = place

    @staticmethod
    def _hopeless(time: float, floor_s: Floats, begins_s: Floats, limit_s: Floats) -> tuple[int, float]:
        """Number of first chunks that are at their lowest in any case, and when they are done.

        Up to the last chunk that is late with all of them at their lowest, no step down is left. `time`: when
        the device begins them.
        """
        done_s = time + np.cumsum(floor_s)
        waits = np.flatnonzero(begins_s[1:] > done_s[:-1])
        end = int(waits[0]) + 1 if len(waits) else len(done_s)
        late = np.flatnonzero(done_s[:end] > limit_s[:end])
        return (int(late[-1]) + 1, float(done_s[late[-1]])) if len(late) else (0, time)

    def _give_back(self, only: int | None = None) -> None:
        """Raise lowered chunks where that makes none later than its deadline: large gains first, then the
        earliest chunks. `only`: see `run`."""
        if only is not None or len(self._queue) > MULTI_PASS_CHUNKS:
            self._raise_by(0.0, only)
            return
        highest, place, quality = self._highest.tolist(), self.place.tolist(), self._qualities
        gain = max((quality[a] - quality[b] for a, b in zip(highest, place, strict=True)), default=0.0)
        for share in GAIN_THRESHOLDS:
            self._raise_by(gain * share)

    def _raise_by(self, least: float, only: int | None = None) -> None:
        """Raise chunks whose quality grows by at least so much. `only`: see `run`."""
        lowered = self.place > self._highest
        if not lowered.any():
            return
        queue, steps = self._queue, self._steps
        work_s = self._work_s()
        rooms_s, limits_s, lost_s = self._rooms(work_s)
        # The least raise of each chunk, if no other is raised.
        above = self._forwards(np.where(lowered, self.place - 1, self.place))
        fits = (above * queue.pace_s - work_s <= rooms_s) & (queue.soonest_s(above) <= limits_s)
        places, highest = self.place.copy(), self._highest
        used_s, passed_s = 0.0, 0.0
        if only is not None and not (fits & lowered)[only]:
            return
        for i in np.flatnonzero(lowered & fits).tolist():
            # Where the device waits, a delay of the chunks before is gone.
            used_s, passed_s = max(0.0, used_s - (lost_s[i] - passed_s)), float(lost_s[i])
            place = int(places[i])
            forwards = float(steps.forwards[place])
            for higher in range(int(highest[i]), place):
                more_s = (float(steps.forwards[higher]) - forwards) * queue.pace_s
                soonest_s = queue.release_s[i] + steps.forwards[higher] * queue.row_s
                if soonest_s <= limits_s[i] and used_s + more_s <= rooms_s[i]:
                    if self._qualities[higher] - self._qualities[place] >= least:
                        places[i] = higher
                        used_s += more_s
                    break
            if i == only:
                break
        self.place = places

    def _rooms(self, work_s: Floats) -> tuple[Floats, Floats, Floats]:
        """For each chunk: by how much it may end later, its latest end, and how long the device has waited.

        What is late stays late, and may not become later.
        """
        queue = self._queue
        done_s = queue.done_s(work_s)
        soonest_s = queue.soonest_s(self._forwards(self.place))
        limits_s = np.maximum(np.maximum(self._limit_s, soonest_s), done_s)
        gaps_s = np.zeros(len(done_s))
        gaps_s[1:] = np.maximum(0.0, queue.begins_s[1:] - done_s[:-1])
        waited_s = np.cumsum(gaps_s)
        # A delay shrinks by each gap that it meets on its way to a later chunk.
        rooms_s = np.minimum.accumulate((limits_s - done_s + waited_s)[::-1])[::-1] - waited_s
        return rooms_s, limits_s, waited_s

    def _refine(self) -> None:
        """Where few chunks are lowered, try to spare each of them, and keep the best plan.

        The exchange takes the cheapest second first, and may take more of them than are needed.
        """
        lowered = np.flatnonzero(self.place > self._highest).tolist()
        if not lowered or len(lowered) * len(self._queue) > REFINE_LIMIT:
            return
        deepest = int(self.place[lowered].max())
        for i, chunk in enumerate(lowered):
            self._spare([chunk], int(self.place[chunk]) - 1)
            self._spare(lowered[: i + 1], 0)
        for place in range(1, deepest):
            self._spare(range(len(self._queue)), place)

    def _spare(self, spared: list[int] | range, lowest: int) -> None:
        """Plan again, with these chunks not below `lowest`; undo that if it is not better."""
        quality, late_s = self._quality(), self._lateness_s()
        places, floors = self.place, self._lowest
        self._lowest = floors.copy()
        self._lowest[spared] = np.maximum(self._highest[spared], np.minimum(floors[spared], lowest))
        self.place = np.minimum(self._highest, places)
        self._lower()
        self._give_back()
        self._lowest = floors
        if self._quality() <= quality or self._lateness_s() > late_s + LATE_S:
            self.place = places

    def _swap(self) -> None:
        """Where few chunks can change, give some of them other configurations at once: see `best_swap`."""
        for _ in range(SWAPS):
            if not (self.place > self._highest).any():
                return
            better = best_swap(self.place, self._highest, self._lowest, self._qualities, self._late_s)
            if better is None:
                return
            self.place = better

    def _quality(self) -> float:
        qualities: list[float] = [self._qualities[place] for place in self.place.tolist()]
        return sum(qualities)

    def _lateness_s(self) -> float:
        return float(self._late_s(self.place))

    def _late_s(self, places: Ints) -> Floats:
        """Lateness of all chunks together, of one plan or of each of several."""
        over_s = self._queue.ready_s(self._forwards(places)) - self._limit_s
        late_s: Floats = np.maximum(0.0, over_s).sum(axis=-1)
        return late_s


def _last(marks: Bools) -> Ints:
    """Index of the last mark up to each place; 0 before the first."""
    last: Ints = np.maximum.accumulate(np.where(marks, np.arange(len(marks)), 0))
    return last

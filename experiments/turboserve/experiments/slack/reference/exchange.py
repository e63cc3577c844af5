"""The rules of the policy `in-time` without its shortcuts: one pass over objects for each step.

The product computes the same plan from arrays (`turboserve.worker.engine.fidelity_exchange`). A test compares
both, and `turboserve bench slack --only decisions` times both.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence

from turboserve.experiments.slack.reference.forecast import PlannedChunk, Server, next_chunks
from turboserve.worker.engine.fidelity_exchange import (
    GAIN_THRESHOLDS,
    LEAD_SHARE,
    MARGIN,
    MULTI_PASS_CHUNKS,
    REFINE_LIMIT,
    ROUNDS,
)
from turboserve.worker.engine.fidelity_forecast import HORIZON, LATE_S, EngineLoad, stream_of
from turboserve.worker.engine.fidelity_in_time import HOLD_S, RAISE_MARGIN
from turboserve.worker.engine.fidelity_ladder import CHANGE, FidelityLadder
from turboserve.worker.engine.fidelity_swap import LEAST_GAIN, SWAP_SIZES, SWAPS


class ReferenceInTime:
    """The policy `in-time` by these rules."""

    def __init__(self, horizon: int = HORIZON) -> None:
        """`horizon`: number of next chunks of each session that a plan covers."""
        self._horizon = horizon

    def choose(self, session: str, load: EngineLoad) -> int:
        """See `FidelityPolicy.choose`."""
        stream = stream_of(session, load)
        if stream.lowest == 0 or load.forward(1) <= 0:
            return 0
        if stream.starts:
            # Its viewer sees nothing yet: time is worth more than one chunk's quality.
            return stream.lowest
        caps = {each.session: each.cap for each in load.streams}
        if caps[session] and stream.raised_s >= HOLD_S:
            raised = plan(load, {**caps, session: 0}, RAISE_MARGIN, self._horizon)
            caps[session] = min(caps[session], raised.get(session, 0))
        return plan(load, caps, MARGIN, self._horizon).get(session, caps[session])


def plan(
    load: EngineLoad, caps: Mapping[str, int], margin: float = 0.0, horizon: int = HORIZON
) -> dict[str, int]:
    """The place on the ladder of each session's next chunk.

    `caps`: highest place of each session's next chunk. `margin`: see `MARGIN`. Sessions without a deadline
    are left out.
    """
    chunks = planned(load, caps, margin, horizon)
    return {chunk.stream.session: chunk.place for chunk in chunks if chunk.next}


def planned(
    load: EngineLoad, caps: Mapping[str, int], margin: float = 0.0, horizon: int = HORIZON
) -> list[PlannedChunk]:
    """The plan's chunks with their configurations, earliest deadline first."""
    chunks = next_chunks(load, horizon)
    for chunk in chunks:
        if chunk.next:
            chunk.highest = caps[chunk.stream.session]
            _set_place(chunk, chunk.highest, load.ladder)
    exchange = _Exchange(load, chunks, margin)
    if exchange.late:
        exchange.lower()
        exchange.give_back()
        exchange.refine()
        exchange.swap()
    return chunks


class _Exchange:
    """Changes the configurations of chunks, which are in the order of their deadlines."""

    def __init__(self, load: EngineLoad, chunks: Sequence[PlannedChunk], margin: float) -> None:
        """`margin`: see `MARGIN`."""
        self._ladder, self._rungs = load.ladder, load.ladder.rungs
        self._chunks, self._server = chunks, Server(load, chunks)
        best = load.ladder.best.forwards
        wanted_s, least_s = (each * best * load.forward(1) for each in (margin, min(margin, MARGIN)))
        taken_s = load.after_s + best * self._server.row_s
        self._due_s = []
        for chunk in chunks:
            possible_s = LEAD_SHARE * (chunk.stream.lead_s - taken_s)
            self._due_s.append(chunk.due_s - max(least_s, min(wanted_s, possible_s)) + LATE_S)

    @property
    def late(self) -> bool:
        """Whether any chunk misses its deadline."""
        ready = self._server.ready_s(self._chunks)
        return any(at > due_s for at, due_s in zip(ready, self._due_s, strict=True))

    def lower(self) -> None:
        """Lower chunks until none is late that can be in time."""
        for _ in range(ROUNDS):
            # Lowering a chunk wins less where later chunks then wait to begin: look again.
            if not self._lower_once():
                return

    def _lower_once(self) -> bool:
        """Lower chunks in one pass over the deadlines. Return whether any was lowered."""
        server, time, changed = self._server, 0.0, False
        offers: list[tuple[float, int, int]] = []
        for i, chunk in enumerate(self._chunks):
            if time < server.release_s[i]:
                # The device waits here: no chunk before makes a later one earlier.
                time = server.release_s[i]
                offers.clear()
            time += chunk.forwards * server.pace_s
            while server.soonest_s(chunk, chunk.forwards) > self._due_s[i] and chunk.place < chunk.lowest:
                time -= self._lowered_s(chunk, self._ladder.step_down(chunk.place, chunk.lowest)[0])
                changed = True
            self._offer(offers, i)
            while time > self._due_s[i] and offers:
                _, at, place = heapq.heappop(offers)
                time -= self._lowered_s(self._chunks[at], place)
                self._offer(offers, at)
                changed = True
        return changed

    def _offer(self, offers: list[tuple[float, int, int]], i: int) -> None:
        chunk = self._chunks[i]
        if chunk.place < chunk.lowest:
            place, lost = self._ladder.step_down(chunk.place, chunk.lowest)
            if chunk.next and place > chunk.stream.place:
                lost *= CHANGE
            heapq.heappush(offers, (lost, i, place))

    def _lowered_s(self, chunk: PlannedChunk, place: int) -> float:
        before = chunk.forwards
        _set_place(chunk, place, self._ladder)
        return (before - chunk.forwards) * self._server.pace_s

    def give_back(self) -> None:
        """Raise lowered chunks where that makes none later than its deadline: large gains first, then the
        earliest chunks."""
        gain = max(
            (self._rungs[chunk.highest].quality - self._rungs[chunk.place].quality for chunk in self._chunks),
            default=0.0,
        )
        passes = GAIN_THRESHOLDS if len(self._chunks) <= MULTI_PASS_CHUNKS else GAIN_THRESHOLDS[-1:]
        for share in passes:
            self._raise_by(gain * share)

    def _raise_by(self, least: float) -> None:
        """Raise chunks whose quality grows by at least so much."""
        server, rungs, used_s = self._server, self._rungs, 0.0
        rooms, limits, done = self._rooms()
        for i, chunk in enumerate(self._chunks):
            if i:
                # Where the device waits, a delay of the chunks before is gone.
                used_s = max(0.0, used_s - max(0.0, server.release_s[i] - done[i - 1]))
            for place in range(chunk.highest, chunk.place):
                more_s = (rungs[place].forwards - chunk.forwards) * server.pace_s
                in_time = server.soonest_s(chunk, rungs[place].forwards) <= limits[i]
                if in_time and used_s + more_s <= rooms[i]:
                    if rungs[place].quality - rungs[chunk.place].quality >= least:
                        _set_place(chunk, place, self._ladder)
                        used_s += more_s
                    break

    def _rooms(self) -> tuple[list[float], list[float], list[float]]:
        """For each chunk: by how much it may end later, its latest end, and its end.

        What is late stays late, and may not become later.
        """
        server, done = self._server, self._server.done_s(self._chunks)
        limits = [
            max(due_s, server.soonest_s(chunk, chunk.forwards), at)
            for chunk, due_s, at in zip(self._chunks, self._due_s, done, strict=True)
        ]
        rooms, room, begins = [0.0] * len(done), math.inf, math.inf
        for i in range(len(done) - 1, -1, -1):
            rooms[i] = room = min(room + max(0.0, begins - done[i]), limits[i] - done[i])
            begins = server.release_s[i]
        return rooms, limits, done

    def refine(self) -> None:
        """Where few chunks are lowered, try to spare each of them, and keep the best plan.

        The exchange takes the cheapest second first, and may take more of them than are needed.
        """
        lowered = [chunk for chunk in self._chunks if chunk.place > chunk.highest]
        if len(lowered) * len(self._chunks) > REFINE_LIMIT:
            return
        deepest = max((chunk.place for chunk in lowered), default=0)
        for i, chunk in enumerate(lowered):
            self._spare([chunk], chunk.place - 1)
            self._spare(lowered[: i + 1], 0)
        for place in range(1, deepest):
            self._spare(self._chunks, place)

    def _spare(self, spared: Sequence[PlannedChunk], lowest: int) -> None:
        """Plan again, with these chunks not below `lowest`; undo that if it is not better."""
        quality, late_s = self._quality(), self._lateness_s()
        places, floors = [chunk.place for chunk in self._chunks], [chunk.lowest for chunk in self._chunks]
        for chunk in spared:
            chunk.lowest = max(chunk.highest, min(chunk.lowest, lowest))
        self._set_places([min(chunk.highest, chunk.place) for chunk in self._chunks])
        self.lower()
        self.give_back()
        for chunk, floor in zip(self._chunks, floors, strict=True):
            chunk.lowest = floor
        if self._quality() <= quality or self._lateness_s() > late_s + LATE_S:
            self._set_places(places)

    def swap(self) -> None:
        """Where few chunks can change, give some of them other configurations at once."""
        for _ in range(SWAPS):
            lowered = any(chunk.place > chunk.highest for chunk in self._chunks)
            if not lowered or not any(self._swap_once(size, most) for size, most in SWAP_SIZES.items()):
                return

    def _swap_once(self, size: int, most: int) -> bool:
        """Make the swap of so many chunks that gains the most and makes the plan no later.

        Return whether there is one. `most`: see `SWAP_SIZES`.
        """
        rungs, late_s, found = self._rungs, self._lateness_s(), []
        changes = [
            (i, place, rungs[place].quality - rungs[chunk.place].quality)
            for i, chunk in enumerate(self._chunks)
            for place in range(chunk.highest, chunk.lowest + 1)
            if place != chunk.place
        ]
        if len(changes) > most:
            return False
        for number, choice in enumerate(itertools.combinations(changes, size)):
            gain = sum(each[2] for each in choice)
            if gain > LEAST_GAIN and len({each[0] for each in choice}) == size:
                found.append((-gain, number, choice))
        places = [chunk.place for chunk in self._chunks]
        for _, _, choice in sorted(found):
            for i, place, _ in choice:
                _set_place(self._chunks[i], place, self._ladder)
            if self._lateness_s() <= late_s + LATE_S:
                return True
            self._set_places(places)
        return False

    def _set_places(self, places: Sequence[int]) -> None:
        for chunk, place in zip(self._chunks, places, strict=True):
            if chunk.place != place:
                _set_place(chunk, place, self._ladder)

    def _quality(self) -> float:
        return sum(self._rungs[chunk.place].quality for chunk in self._chunks)

    def _lateness_s(self) -> float:
        ready = self._server.ready_s(self._chunks)
        return sum(max(0.0, at - due_s) for at, due_s in zip(ready, self._due_s, strict=True))


def _set_place(chunk: PlannedChunk, place: int, ladder: FidelityLadder) -> None:
    chunk.place, chunk.forwards = place, ladder.rungs[place].forwards

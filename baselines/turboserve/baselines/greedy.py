"""The paper's baselines (TurboServe, 7.1): assign one session after the other, without migration."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from turboserve.scheduler.placement.interface import Placement, why_not
from turboserve.scheduler.placement.pool import LatencyCurve
from turboserve.scheduler.placement.types import Candidate, Choice, Demand


class OneByOne(Placement):
    """Takes demands in order. A subclass chooses the best of the candidates with room."""

    reason: str

    def place(self, candidates: Sequence[Candidate], demands: Sequence[Demand]) -> list[Choice]:
        loads = {candidate.worker: candidate.load for candidate in candidates}
        choices = []
        for demand in demands:
            serving = [c for c in candidates if c.serves(demand)]
            rooms = [
                c
                for c in serving
                if loads[c.worker] - (c.worker == demand.counted_on) < c.capacity
                and c.worker not in demand.excluded
            ]
            numbers: dict[str, float] = {"candidates": len(serving)}
            if not rooms:
                refused = any(c.worker in demand.excluded for c in serving)
                reason = why_not(len(serving), refused, demand)
                choices.append(Choice(demand.session, None, reason, numbers))
                continue
            best = self._best([c for c in rooms if not c.suspect] or rooms, loads, demand)
            loads[best.worker] += best.worker != demand.counted_on
            numbers |= {"sessions": loads[best.worker], "capacity": best.capacity}
            choices.append(Choice(demand.session, best.worker, self.reason, numbers))
        return choices

    @abstractmethod
    def _best(self, rooms: list[Candidate], loads: dict[str, int], demand: Demand) -> Candidate:
        """Choose one of `rooms`, which is not empty. `loads` includes the earlier choices."""


class RoundRobin(OneByOne):
    """Chooses the next worker with room, by id, after the last chosen one of the model.

    This is the only placement whose choices depend on earlier calls.
    """

    reason = "it is the next in turn"

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def _best(self, rooms: list[Candidate], loads: dict[str, int], demand: Demand) -> Candidate:
        last = self._last.get(demand.model, "")
        best = min(rooms, key=lambda c: (c.worker <= last, c.worker))
        self._last[demand.model] = best.worker
        return best


class LoadAwareGreedy(OneByOne):
    """LAG: chooses the worker with the lowest present chunk latency, without the new session's share."""

    reason = "it is the least busy"

    def _best(self, rooms: list[Candidate], loads: dict[str, int], demand: Demand) -> Candidate:
        # Workers of one kind may share a profile, so each is read once.
        curves: dict[tuple[int, int], LatencyCurve] = {}

        def busy(candidate: Candidate) -> tuple[float, float, str]:
            load = loads[candidate.worker]
            key = id(candidate.chunk_latency_s), candidate.capacity
            if (curve := curves.get(key)) is None:
                curve = curves[key] = LatencyCurve(candidate.chunk_latency_s, candidate.capacity)
            return curve(load), load / candidate.capacity, candidate.worker

        return min(rooms, key=busy)


class MemoryAwareGreedy(OneByOne):
    """MAG: chooses the worker with the smallest part of its session memory in use.

    Every slot is a slab of the same size, so this is the part of its slots in use.
    """

    reason = "it has the smallest part of its memory in use"

    def _best(self, rooms: list[Candidate], loads: dict[str, int], demand: Demand) -> Candidate:
        return min(rooms, key=lambda c: (loads[c.worker] / c.capacity, c.worker))

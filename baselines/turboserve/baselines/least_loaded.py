"""Least-loaded assignment, a baseline that ignores latencies."""

from __future__ import annotations

from collections.abc import Sequence

from turboserve.scheduler.placement.interface import Placement, serving_by_kind, why_not
from turboserve.scheduler.placement.types import Candidate, Choice, Demand


class LeastLoaded(Placement):
    """Chooses the worker where the bottleneck load grows least; ties go to the lower load, then the lower id.

    Load is (sessions + 1) / K, so that unequal workers fill in proportion. A resumed session returns to the
    worker that holds its state if there is room. Suspect workers are the last resort.
    """

    def place(self, candidates: Sequence[Candidate], demands: Sequence[Demand]) -> list[Choice]:
        serving = serving_by_kind(candidates, demands)
        added = {candidate.worker: 0 for candidate in candidates}
        return [self._one(serving[demand.kind_of_worker], added, demand) for demand in demands]

    def _one(self, candidates: list[Candidate], added: dict[str, int], demand: Demand) -> Choice:
        rooms: list[tuple[Candidate, int]] = []
        bottleneck = 0.0
        for candidate in candidates:
            others = candidate.load + added[candidate.worker] - (candidate.worker == demand.counted_on)
            if candidate.capacity > 0:
                bottleneck = max(bottleneck, others / candidate.capacity)
            if others < candidate.capacity and candidate.worker not in demand.excluded:
                rooms.append((candidate, others))
        if not rooms:
            refused = any(c.worker in demand.excluded for c in candidates)
            reason = why_not(len(candidates), refused, demand)
            return Choice(demand.session, None, reason, {"candidates": len(candidates)})
        held = next((room for room in rooms if room[0].worker == demand.holder and not room[0].suspect), None)
        if held is not None:
            candidate, others = held
            reason = "it holds the session's state"
        else:
            candidate, others = min(rooms, key=lambda room: _cost(room[0], room[1], bottleneck))
            reason = "the bottleneck load grows least"
        if candidate.worker != demand.counted_on:
            added[candidate.worker] += 1
        load = (others + 1) / candidate.capacity
        numbers = {
            "load": load,
            "bottleneck_before": bottleneck,
            "bottleneck_after": max(bottleneck, load),
            "sessions": others + 1,
            "capacity": candidate.capacity,
            "candidates": len(candidates),
        }
        return Choice(demand.session, candidate.worker, reason, numbers)


def _cost(candidate: Candidate, others: int, bottleneck: float) -> tuple[bool, float, float, str]:
    after = (others + 1) / candidate.capacity
    return candidate.suspect, max(bottleneck, after), others / candidate.capacity, candidate.worker

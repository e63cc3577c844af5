"""Where a session goes: the interface of all placement algorithms, and the least-loaded one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Candidate:
    """One worker that may be given sessions."""

    worker: str
    model: str
    capacity: int
    """K: sessions that fit at once."""
    load: int
    """Sessions that hold a slot or have one reserved."""
    suspect: bool = False
    """It was not heard of when it should have been; better not, if there is another."""
    chunk_latency_s: Mapping[int, float] = field(default_factory=dict)
    """Measured profile L(b), seconds by batch size; may be empty."""


@dataclass(frozen=True)
class Demand:
    """One session that needs a worker."""

    session: str
    model: str
    kind: str
    """place, resume or recover."""
    holder: str | None = None
    """Who has its state in host memory: going on there moves nothing."""
    counted_on: str | None = None
    """The candidate whose `load` already includes this session."""
    excluded: frozenset[str] = frozenset()
    """Workers that have refused it."""


@dataclass(frozen=True)
class Choice:
    """What a placement says of one session: a worker, or (None) that it waits; why; and the numbers."""

    session: str
    worker: str | None
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)


class Placement(Protocol):
    """Decides for all sessions that need a worker at one event (TurboServe, 5.2.1).

    `candidates` are the workers that may be given sessions: alive, ready, not draining; in order of id.
    `demands` come in order of precedence: an earlier one is not left waiting so that a later one of the same
    model gets the slot. Returns one Choice per demand, in the same order, and never puts a worker's load
    above its capacity, counting the choices before. Depends on nothing but its arguments: the same cluster
    and demands give the same choices.
    """

    def place(self, candidates: Sequence[Candidate], demands: Sequence[Demand]) -> list[Choice]: ...


class LeastLoaded:
    """The worker where the bottleneck load grows least; ties to the less loaded, then by id.

    Load is (sessions + 1) / K, so that unequal workers are filled in proportion. A session that is resumed
    goes back to the worker that holds its state if there is room.
    """

    def place(self, candidates: Sequence[Candidate], demands: Sequence[Demand]) -> list[Choice]:
        by_model: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            by_model.setdefault(candidate.model, []).append(candidate)
        added = {candidate.worker: 0 for candidate in candidates}
        return [self._one(by_model.get(demand.model, []), added, demand) for demand in demands]

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
            return Choice(demand.session, None, _why_not(candidates, demand), {"candidates": len(candidates)})
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


def _why_not(candidates: list[Candidate], demand: Demand) -> str:
    if not candidates:
        return f"no worker that serves {demand.model} is ready"
    if any(c.worker in demand.excluded for c in candidates):
        return "the workers with room have refused it"
    return f"all {len(candidates)} workers that serve {demand.model} are full"

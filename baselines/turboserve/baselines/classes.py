"""Placement of classes without shares: a static split of the workers, and min-max that knows no classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.allocation.linear import LinearProgram
from turboserve.scheduler.placement.interface import Placement
from turboserve.scheduler.placement.minmax import MinMax
from turboserve.scheduler.placement.mixed import MixedLatency, MixedMinMax, as_declared
from turboserve.scheduler.placement.pool import CHUNK_S
from turboserve.scheduler.placement.quotas import Worker
from turboserve.scheduler.placement.share_keeper import kinds_of
from turboserve.scheduler.placement.types import Candidate, Choice, Demand

Split = Mapping[str, SessionClass]
"""The only class that each worker serves."""


class StaticSplit(Placement):
    """Each worker serves one class only. The split is decided once, for equal demand of all classes.

    It is the best such split: the least number of sessions of a class that it serves is the largest. Within
    its class, a session goes where the bottleneck latency grows least. Other workers of the same names and
    capabilities keep the split; another set of workers is split anew.
    """

    def __init__(self) -> None:
        self._placement = MixedMinMax()
        self._workers: tuple[str, ...] = ()
        self._split: Split = {}

    def place(self, candidates: Sequence[Candidate], demands: Sequence[Demand]) -> list[Choice]:
        declared = [as_declared(candidate) for candidate in candidates]
        names = tuple(candidate.worker for candidate in declared)
        if names != self._workers:
            self._workers, self._split = names, split_equally(declared)
        return self._placement.place([_only(c, self._split) for c in declared], demands)


def split_equally(candidates: Sequence[Candidate]) -> Split:
    """Return the best split for equal demand. A class that no worker serves gets none."""
    workers = [Worker(c.worker, c.capability, {}) for c in candidates if c.capability is not None]
    by_kind = kinds_of(workers)
    classes = sorted({one for w in workers for one in w.capability.sessions if w.capability.serves(one)})
    linear = LinearProgram()
    least = linear.column(0.0)
    cells: dict[tuple[str, SessionClass], int] = {}
    terms: dict[SessionClass, list[tuple[int, float]]] = {one: [] for one in classes}
    for kind, of_kind in by_kind.items():
        columns = []
        for one in classes:
            if of_kind[0].capability.serves(one):
                column = cells[kind, one] = linear.column(0.0, float(len(of_kind)), integral=True)
                terms[one].append((column, float(_alone(of_kind[0].capability, one))))
                columns.append((column, 1.0))
        linear.row(columns, upper=float(len(of_kind)))
    for one in classes:
        linear.row([*terms[one], (least, -1.0)], lower=0.0)
    # Of equal splits, the one with more sessions.
    further = [(column, -1e-4 * value) for one in classes for column, value in terms[one]]
    solution = linear.minimize([(least, -1.0), *further])
    found: dict[str, SessionClass] = {}
    for kind, of_kind in by_kind.items():
        rest = [worker.name for worker in of_kind]
        for one in classes:
            count = round(solution.values[cells[kind, one]]) if (kind, one) in cells else 0
            found.update(dict.fromkeys(rest[:count], one))
            del rest[:count]
    return found


def _alone(capability: Capability, one: SessionClass) -> int:
    return capability.most(one, {})


def _only(candidate: Candidate, split: Split) -> Candidate:
    assert candidate.capability is not None
    one = split.get(candidate.worker)
    sessions = {} if one is None else {one: candidate.capability.sessions[one]}
    return replace(candidate, capability=replace(candidate.capability, sessions=sessions))


class ClassBlind(Placement):
    """Min-max by the number of sessions, as for workers of unlike speed and sessions of one class.

    L(n) of a worker is proportional to n, through the latency of the sessions that it has. An empty worker
    has the mean latency of the classes at their shares of all sessions. K is the most that this latency keeps
    in real time. So the policy knows how busy each worker is, and not which session makes it so.
    """

    def __init__(self) -> None:
        self._placement = MinMax()
        self._seen: Counter[SessionClass] = Counter()

    def place(self, candidates: Sequence[Candidate], demands: Sequence[Demand]) -> list[Choice]:
        declared = {candidate.worker: as_declared(candidate) for candidate in candidates}
        counts = {name: Counter(candidate.counts) for name, candidate in declared.items()}
        latencies = {name: _latency(candidate) for name, candidate in declared.items()}
        mix = sum(counts.values(), Counter(demand.known_class for demand in demands))
        views = {name: _view(c, counts[name], latencies[name], mix) for name, c in declared.items()}
        choices = []
        for demand in demands:
            [choice] = self._placement.place(
                [
                    replace(views[name], model=demand.model)
                    for name, candidate in declared.items()
                    if candidate.capability is not None and candidate.capability.serves(demand.known_class)
                ],
                [demand],
            )
            choices.append(choice)
            if choice.worker is not None:
                counts[choice.worker][demand.known_class] += 1
                views[choice.worker] = _view(
                    declared[choice.worker], counts[choice.worker], latencies[choice.worker], mix
                )
        return choices


def _latency(candidate: Candidate) -> MixedLatency:
    assert candidate.capability is not None
    return MixedLatency(candidate.capability, candidate.class_latency_s, CHUNK_S)


def _view(
    candidate: Candidate, counts: Counter[SessionClass], latency: MixedLatency, mix: Counter[SessionClass]
) -> Candidate:
    """Return the candidate as a policy that counts sessions sees it."""
    assert candidate.capability is not None
    held = counts.total()
    if held:
        each_s = latency(counts) / held
    else:
        rates = candidate.capability.sessions
        known = {one: count for one, count in mix.items() if rates.get(one, 0) > 0}
        total = sum(known.values())
        mean = sum(count / rates[one] for one, count in known.items()) / total if total else 1.0
        each_s = mean * CHUNK_S
    slots = max(1, int(CHUNK_S / each_s + 1e-9)) if each_s > 0 else candidate.capacity
    return replace(
        candidate,
        capability=None,
        counts={},
        class_latency_s={},
        capacity=min(slots, candidate.capacity),
        floor_capacity=0,
        load=held,
        chunk_latency_s={1: each_s},
    )

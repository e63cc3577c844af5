"""Mixes that change over time, for pools that never switch, reload from disk, or get weights from workers.

In virtual time, in steps of some seconds. The autoscaler's controller decides the composition, and the
placement core places sessions by min-max. Every n_kj, price and start-up time is declared. A session that a
draining worker hands over misses no chunk: migrations are measured elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from turboserve.allocation.classes import SessionClass
from turboserve.autoscaler.control.composition import Terms
from turboserve.autoscaler.control.composition_controller import CompositionController
from turboserve.autoscaler.control.composition_goal import CompositionGoal, answer_to
from turboserve.autoscaler.control.events import ControlTick, FeedbackReceived
from turboserve.autoscaler.control.policy import ControlPolicy, default_table
from turboserve.autoscaler.control.pool_offers import OffersObserved, OfferState, OfferWorkers, PoolOffer
from turboserve.contracts.pool import LoadFeedback
from turboserve.experiments.mixed.family import CLASSES, MIXES, Matrix, matrix
from turboserve.experiments.mixed.mixed_worker import MixedWorker, Visit
from turboserve.experiments.mixed.snapshot import fluid_load
from turboserve.experiments.weighted import percentile_of
from turboserve.scheduler.placement import PLACEMENTS, Demand, Placement
from turboserve.scheduler.placement.pool import CHUNK_S
from turboserve.scheduler.placement.types import Candidate

TRACES: Mapping[str, tuple[float, Sequence[str]]] = {
    "T1": (80 * 60.0, ("S1", "S4", "S5")),
    "T2": (50 * 60.0, ("S2", "S4", "S3")),
}
"""Length, seconds, and the mixes that follow each other (OServe, 6.1 and its temporal mixes)."""
MODES = ("none", "disk", "peers")
STEP_S = 10.0
STAY_S = 240.0
"""Mean stay of a session; exponential."""
LOAD = 0.6
"""Sessions as a part of what the whole pool serves of the trace's worst mix, in fractions of sessions."""
DISK_S, PEERS_S = 50.0, 10.0
"""Time from the order of a worker until it serves, by OServe: reload, and ad hoc switch."""


@dataclass
class SwitchingRun:
    """What one run counts."""

    chunks: Counter[float] = field(default_factory=Counter)
    """Chunks by their latency, seconds."""
    first: list[float] = field(default_factory=list)
    """Time of each session until its first chunk, seconds."""
    cost: float = 0.0
    started: int = 0
    """Workers that were started after the beginning."""
    without_place: int = 0
    """Most sessions of a draining worker that had no place on another one, at the worst instant."""

    def figures(self) -> dict[str, float]:
        chunks = self.chunks + Counter(self.first)
        return {
            "p99_chunk_s": percentile_of(chunks, 0.99),
            "p99_first_chunk_s": percentile_of(Counter(self.first), 0.99),
            "late_chunks_percent": 100 * sum(n for s, n in chunks.items() if s > CHUNK_S) / chunks.total(),
            "cost": self.cost,
            "started": self.started,
            "without_place": self.without_place,
        }


def switching_run(number: int, trace: str, mode: str, seed: int) -> dict[str, float]:
    """Run one trace on one matrix. Equal seeds have equal sessions in all modes."""
    return _Pool(matrix(number), trace, mode).run(Random(f"switching {trace} {seed}")).figures()


class _Pool:
    def __init__(self, of: Matrix, trace: str, mode: str) -> None:
        self._trace, self._mode = TRACES[trace], mode
        start_s = PEERS_S if mode == "peers" else DISK_S
        means = [sum(one.sessions.values()) for one in of.capabilities]
        self._terms = {
            f"k{k}": Terms(mean * len(means) / sum(means), of.workers, start_s, start_s)
            for k, mean in enumerate(means)
        }
        self._offers = {
            f"k{k}c{j}": PoolOffer(f"k{k}c{j}", f"k{k}", {one.name: capability.sessions[one]})
            for k, capability in enumerate(of.capabilities)
            for j, one in enumerate(CLASSES)
        }
        self._profiles = {
            f"k{k}c{j}": of.latency_s[k][one]
            for k in range(len(of.capabilities))
            for j, one in enumerate(CLASSES)
        }
        self._number = LOAD * min(fluid_load(of, mix) for mix in self._trace[1])
        sizes = self._fixed(of.workers * len(means))
        policy = ControlPolicy(
            least=0, most=of.workers * len(means), horizon_s=start_s + STEP_S, stale_s=3 * STEP_S
        )
        self._controller = CompositionController(
            policy, default_table(), tuple(self._offers.values()), self._terms, sizes
        )
        self._placement: Placement = PLACEMENTS.make("min-max")
        self._names = (f"w{number}" for number in range(10**6))
        self._workers = [self._worker(name, 0.0) for name, size in sizes.items() for _ in range(size)]
        self._waiting: list[Visit] = []
        self._found = SwitchingRun()

    def _fixed(self, workers: int) -> dict[str, int]:
        """Return the composition of the whole hardware that is best for the trace's mean mix."""
        shares = [
            sum(column) / len(column) for column in zip(*(MIXES[m] for m in self._trace[1]), strict=True)
        ]
        wanted = {one.name: round(self._number * s) for one, s in zip(CLASSES, shares, strict=True)}
        none = dict.fromkeys(self._offers, 0)
        goal = CompositionGoal(OfferWorkers(tuple(self._offers.values()), self._terms), none)
        goal.is_solved(none, wanted, wanted, workers, 0.0)
        assert goal.problem is not None
        answer = answer_to(goal.problem)
        assert answer.found is not None, answer.error
        return dict(answer.found.sizes)

    def _worker(self, offer: str, ready_at: float) -> MixedWorker:
        [served] = self._offers[offer].sessions.items()
        return MixedWorker(next(self._names), self._offers[offer], *served, self._profiles[offer], ready_at)

    def run(self, source: Random) -> SwitchingRun:
        arrivals, last = _visits(source, self._trace, self._number), self._trace[0]
        coming = next(arrivals)
        now = 0.0
        while now < last:
            while coming.came_at <= now:
                self._waiting.append(coming)
                coming = next(arrivals)
            self._leave(now)
            self._hand_over(now)
            self._waiting = self._place(self._waiting, now)
            self._count(now)
            if self._mode != "none":
                self._decide(now)
            now += STEP_S
        # A session that has never had a place has waited at least until now.
        self._found.first += [now - one.came_at for one in self._waiting]
        return self._found

    def _leave(self, now: float) -> None:
        for worker in self._workers:
            worker.sessions = [one for one in worker.sessions if one.leaves_at > now]
        self._found.first += [now - one.came_at for one in self._waiting if one.leaves_at <= now]
        self._waiting = [one for one in self._waiting if one.leaves_at > now]

    def _hand_over(self, now: float) -> None:
        for worker in self._workers:
            if worker.leaving:
                worker.sessions = self._place(worker.sessions, now, first=False)
                self._found.without_place = max(self._found.without_place, len(worker.sessions))
        self._workers = [one for one in self._workers if not one.leaving or one.sessions]

    def _place(self, sessions: Sequence[Visit], now: float, *, first: bool = True) -> list[Visit]:
        """Place sessions on ready workers. Returns those without room."""
        left, by_name = [], {one.name: one for one in self._workers if self._serves(one, now)}
        for one in sessions:
            candidates = [
                Candidate(
                    worker=worker.name,
                    model=worker.model,
                    capacity=worker.capacity,
                    load=len(worker.sessions),
                    chunk_latency_s=worker.profile,
                )
                for worker in by_name.values()
            ]
            [choice] = self._placement.place(candidates, [Demand("s", one.model, "place")])
            if choice.worker is None:
                left.append(one)
                continue
            worker = by_name[choice.worker]
            worker.sessions.append(one)
            if first:
                self._found.first.append(now - one.came_at + worker.latency_s)
        return left

    @staticmethod
    def _serves(worker: MixedWorker, now: float) -> bool:
        return worker.ready_at <= now and not worker.leaving

    def _count(self, now: float) -> None:
        for worker in self._workers:
            self._found.cost += self._terms[worker.offer.kind].price * STEP_S / 3600.0
            if count := len(worker.sessions):
                self._found.chunks[round(worker.latency_s, 4)] += round(count * STEP_S / CHUNK_S)

    def _decide(self, now: float) -> None:
        of_offer: dict[str, list[MixedWorker]] = {name: [] for name in self._offers}
        for worker in self._workers:
            of_offer[worker.offer.name].append(worker)
        states = {
            name: OfferState(
                ready=sum(self._serves(one, now) for one in workers),
                leaving=sum(one.leaving for one in workers),
                sessions={self._offers[name].models[0]: sum(len(one.sessions) for one in workers)},
                starting=sum(one.ready_at > now and not one.leaving for one in workers),
                stable_since=0.0,
            )
            for name, workers in of_offer.items()
        }
        self._controller.handle(OffersObserved(states), now)
        for one in CLASSES:
            self._controller.handle(FeedbackReceived(self._load(one.name, now)), now)
        self._controller.handle(ControlTick(), now)
        while (problem := self._controller.problem()) is not None:
            self._controller.handle(answer_to(problem), now)
        self._resize(now)

    def _load(self, model: str, now: float) -> LoadFeedback:
        own = [worker for worker in self._workers if worker.model == model]
        waiting = sum(one.model == model for one in self._waiting)
        held = sum(len(worker.sessions) for worker in own)
        ready = [worker for worker in own if self._serves(worker, now)]
        return LoadFeedback(
            model=model,
            rho_max=0.0,
            required=held + waiting,
            waiting=waiting,
            capacity=sum(worker.capacity for worker in ready),
            workers=len(ready),
            at=now,
        )

    def _resize(self, now: float) -> None:
        for name, size in self._controller.sizes.items():
            own = [one for one in self._workers if one.offer.name == name and not one.leaving]
            # Without room, one takes the place of a worker that has not ended yet.
            for _ in range(min(size - len(own), self._room(name))):
                self._workers.append(self._worker(name, now + self._start_s(name, now)))
                self._found.started += 1
            # As the pool does: first a worker that is not ready, then that with the fewest sessions.
            fewest = sorted(own, key=lambda one: (one.ready_at <= now, len(one.sessions)))
            for worker in fewest[: max(len(own) - size, 0)]:
                worker.leaving = True

    def _room(self, offer: str) -> int:
        kind = self._offers[offer].kind
        return self._terms[kind].most - sum(one.offer.kind == kind for one in self._workers)

    def _start_s(self, offer: str, now: float) -> float:
        """Weights come from a worker that serves the model, also at another frame size."""
        [model] = {SessionClass.of_name(one).model for one in self._offers[offer].models}
        served = (SessionClass.of_name(one.model).model for one in self._workers if one.ready_at <= now)
        return PEERS_S if self._mode == "peers" and model in served else DISK_S


def _visits(source: Random, trace: tuple[float, Sequence[str]], number: float) -> Iterator[Visit]:
    """Draw the sessions of a trace in the order in which they come, without end: those of the start first."""
    length_s, mixes = trace

    def visit(at: float) -> Visit:
        mix = mixes[min(int(at / length_s * len(mixes)), len(mixes) - 1)]
        [one] = source.choices(CLASSES, MIXES[mix])
        return Visit(one.name, at, at + source.expovariate(1 / STAY_S))

    yield from [visit(0.0) for _ in range(round(number))]
    now = 0.0
    while True:
        now += source.expovariate(number / STAY_S)
        yield visit(now)

"""Placement of sessions of several classes: quotas from shares, as a preference above min-max."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from turboserve.allocation.classes import ROUNDING, Capability, SessionClass
from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.interface import Placement, Rebalancer, why_not
from turboserve.scheduler.placement.minmax import HELD, LEAST, WITHIN_QUOTA, MinMax
from turboserve.scheduler.placement.pool import CHUNK_S, LatencyCurve
from turboserve.scheduler.placement.quotas import Quotas
from turboserve.scheduler.placement.share_keeper import ShareKeeper
from turboserve.scheduler.placement.types import Candidate, Choice, Demand


class MixedLatency:
    """Seconds of one chunk of each session of a worker with Σ_j x_j sessions: Σ_j L_j(x_j).

    Rows of unlike shape never share a forward, so the batches of the classes follow each other. A class
    without a profile takes x_j / n_j of the chunk's playing time.
    """

    def __init__(
        self, capability: Capability, profiles: Mapping[SessionClass, Mapping[int, float]], chunk_s: float
    ) -> None:
        self._capability, self._profiles, self._chunk_s = capability, profiles, chunk_s
        self._curves: dict[SessionClass, LatencyCurve] = {}

    def __call__(self, counts: Mapping[SessionClass, int]) -> float:
        return sum(self._of(one)(count) for one, count in counts.items() if count)

    def _of(self, one: SessionClass) -> LatencyCurve:
        curve = self._curves.get(one)
        if curve is None:
            served = self._capability.sessions.get(one, 0)
            profile = self._profiles.get(one) or {max(served, 1): self._chunk_s}
            curve = self._curves[one] = LatencyCurve(profile, served)
        return curve


def as_declared(candidate: Candidate) -> Candidate:
    """Return a candidate with a capability: the declared one, or K sessions of its model."""
    if candidate.capability is not None:
        return candidate
    one = SessionClass(candidate.model)
    return replace(
        candidate,
        capability=Capability({one: candidate.capacity}),
        class_latency_s={one: candidate.chunk_latency_s} if candidate.chunk_latency_s else {},
        counts={one: candidate.load} if candidate.load else {},
    )


def class_on(candidate: Candidate, demand: Demand) -> SessionClass | None:
    """Return the class as which a worker serves a session; None if it does not serve it.

    A worker that does not tell a class from others of its model serves it as the model's.
    """
    if demand.weights_digest not in (None, candidate.weights_digest):
        return None
    assert candidate.capability is not None
    one = demand.known_class
    for known in (one, SessionClass(one.model)):
        if candidate.capability.serves(known):
            return known
    return None


class _Load:
    """One candidate, the sessions on it, and what one session more would cost. The costs are kept."""

    __slots__ = ("_after_s", "_as", "_chunk_s", "_latency", "candidate", "counts", "now_s", "total")

    def __init__(
        self,
        candidate: Candidate,
        latency: MixedLatency,
        chunk_s: float,
        counts: Counter[SessionClass] | None = None,
    ) -> None:
        self.candidate, self._latency, self._chunk_s = candidate, latency, chunk_s
        self.counts = Counter(candidate.counts) if counts is None else counts
        self._as: dict[tuple[SessionClass, str | None], SessionClass | None] = {}
        self._count()

    def _count(self) -> None:
        self.total = self.counts.total()
        self.now_s = self._latency(self.counts)
        self._after_s: dict[SessionClass, float | None] = {}

    def serves_as(self, demand: Demand) -> SessionClass | None:
        """See `class_on`."""
        key = demand.known_class, demand.weights_digest
        if key not in self._as:
            self._as[key] = class_on(self.candidate, demand)
        return self._as[key]

    def add(self, one: SessionClass) -> None:
        self.counts[one] += 1
        self._count()

    def without(self, one: SessionClass) -> _Load:
        """Return the same worker with one session less."""
        counts = self.counts.copy()
        counts[one] -= 1
        return _Load(self.candidate, self._latency, self._chunk_s, counts)

    def after_s(self, one: SessionClass) -> float | None:
        """Return the latency with one session more, seconds. None: the worker has no room for it."""
        if one not in self._after_s:
            counts = self.counts.copy()
            counts[one] += 1
            latency_s = self._latency(counts)
            self._after_s[one] = latency_s if self._fits(counts, latency_s) else None
        return self._after_s[one]

    def _fits(self, counts: Counter[SessionClass], latency_s: float) -> bool:
        capability = self.candidate.capability
        assert capability is not None
        if self.total >= max(self.candidate.capacity, 1) or not capability.fits(counts):
            return False
        # One class alone is as the capability says: its number of sessions may be the operator's limit.
        alone = sum(count > 0 for count in counts.values()) == 1
        return alone or latency_s <= self._chunk_s * (1 + ROUNDING)


class _Option(NamedTuple):
    """One worker that has room for a session, and the class as which it serves it."""

    on: _Load
    one: SessionClass
    within: bool
    """Whether the worker's quota of the class is not used up."""
    after_s: float

    def order(self, bottleneck_s: float) -> tuple[bool, bool, float, float, float, str]:
        candidate = self.on.candidate
        load = self.on.total / max(candidate.capacity, 1)
        after_s = max(bottleneck_s, self.after_s)
        return candidate.suspect, not self.within, after_s, self.after_s, load, candidate.worker


class MixedMinMax(Placement):
    """Min-max over classes: each session goes where the bottleneck latency grows least, within the quotas.

    A worker has room for a session if its polytope has, and if the latency that its profiles tell for the
    classes together is at most a chunk's playing time. Of the workers with room, those whose quota of the
    class is not used up come first. The quotas are soft: if none has room, any worker takes the session.

    A cluster in which no worker declares a capability is placed by `MinMax`, unchanged. With one declared
    class and no quotas the choices are the same, too.
    """

    def __init__(self, rebalancer: Rebalancer | None = None, keeper: ShareKeeper | None = None) -> None:
        self._plain = MinMax(rebalancer)
        self.keeper = keeper or ShareKeeper()
        self.chunk_s = CHUNK_S
        self._quotas: Quotas = {}
        self._latencies: dict[str, tuple[object, MixedLatency]] = {}

    def observe(self, candidates: Sequence[Candidate], demands: Sequence[Demand], now: float) -> None:
        """Update the quotas. Call it before `assign` or `place` whenever time has passed."""
        self.keeper.update(candidates, (d.known_class for d in demands if d.counted_on is None), now)
        self._quotas = self.keeper.quotas(now)

    def assign(self, cluster: Cluster, demands: Sequence[Demand]) -> list[Choice]:
        if not demands or not any(e.state.capability is not None for e in cluster.entries.values()):
            return self._plain.assign(cluster, demands)
        return self.place(cluster.candidates(), demands)

    def place(self, candidates: Sequence[Candidate], demands: Sequence[Demand]) -> list[Choice]:
        if all(candidate.capability is None for candidate in candidates):
            return self._plain.place(candidates, demands)
        workers = [
            _Load(declared, self._latency(declared), self.chunk_s)
            for declared in map(as_declared, candidates)
        ]
        return [self._place(workers, demand) for demand in demands]

    def _place(self, workers: Sequence[_Load], demand: Demand) -> Choice:
        serving = [(on, one) for on in workers if (one := on.serves_as(demand)) is not None]
        options: list[_Option] = []
        bottleneck_s = 0.0
        for on, one in serving:
            candidate = on.candidate
            if candidate.worker == demand.counted_on:
                on = on.without(one)
            if not candidate.suspect:
                bottleneck_s = max(bottleneck_s, on.now_s)
            after_s = None if candidate.worker in demand.excluded else on.after_s(one)
            if after_s is not None:
                within = self._quotas.get(candidate.worker, {}).get(one, 0) > on.counts[one]
                options.append(_Option(on, one, within, after_s))
        if not options:
            refused = any(on.candidate.worker in demand.excluded for on, _ in serving)
            reason = why_not(len(serving), refused, demand)
            return Choice(demand.session, None, reason, {"candidates": len(serving)})
        kept = [o for o in options if o.on.candidate.worker == demand.holder and not o.on.candidate.suspect]
        best = min(kept or options, key=lambda option: option.order(bottleneck_s))
        chosen, others = best.on.candidate, best.on.total
        if chosen.worker != demand.counted_on:
            best.on.add(best.one)
        numbers = {
            "latency_s": best.after_s,
            "bottleneck_before_s": bottleneck_s,
            "bottleneck_after_s": bottleneck_s if chosen.suspect else max(bottleneck_s, best.after_s),
            "sessions": others + 1,
            "capacity": chosen.capacity,
            "candidates": len(serving),
        }
        reason = HELD if kept else WITHIN_QUOTA if best.within else LEAST
        return Choice(demand.session, chosen.worker, reason, numbers)

    def _latency(self, candidate: Candidate) -> MixedLatency:
        assert candidate.capability is not None
        key = candidate.capability, candidate.class_latency_s
        known = self._latencies.get(candidate.worker)
        if known is None or known[0] != key:
            latency = MixedLatency(candidate.capability, candidate.class_latency_s, self.chunk_s)
            known = self._latencies[candidate.worker] = key, latency
        return known[1]

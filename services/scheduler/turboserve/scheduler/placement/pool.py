"""The workers between which sessions can migrate, ranked by their chunk latency."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

from turboserve.scheduler.placement.links import LinkKind, node_of
from turboserve.scheduler.placement.ranking import Item, Ranking
from turboserve.scheduler.placement.types import Candidate, WorkerState

CHUNK_S = 0.75
"""Playing time of a chunk in seconds; also the assumed chunk latency of a full worker without a profile."""

GAIN = 0.8
LEAST_GAIN = 0.05
"""Part of a row's throughput that a further row of a batch must add: `GAIN` divided by the ready sessions, at
least `LEAST_GAIN`. Both are the worker's."""


class LatencyCurve:
    """Seconds of a chunk by number of sessions. The curve never falls, and L(0) is 0.

    - Between measured sizes, the curve is linear.
    - Beyond them, it continues with the last slope, or in proportion if there is only one measurement.
    - Without measurements, L(n) is n / `capacity` of `CHUNK_S`, so that unequal workers fill in proportion.
    """

    __slots__ = ("_best_batches", "_measured", "_seconds", "measured")

    def __init__(self, profile: Mapping[int, float], capacity: int) -> None:
        self.measured = bool(profile)
        self._measured = sorted(profile.items()) or [(max(capacity, 1), CHUNK_S)]
        if not profile:
            self._measured.insert(0, (0, 0.0))
        self._seconds = [0.0]
        self._best_batches = [0, 1]

    def __call__(self, sessions: int) -> float:
        seconds = self._seconds
        while len(seconds) <= sessions:
            seconds.append(max(seconds[-1], self._at(len(seconds))))
        return seconds[sessions]

    def most(self, limit_s: float, up_to: int) -> int:
        """Return the largest n ≤ `up_to` with L(n) ≤ `limit_s`."""
        self(up_to)
        return max(0, bisect.bisect_right(self._seconds, limit_s, 0, up_to + 1) - 1)

    def best_batch(self, ready: int) -> int:
        """Return the largest batch of at most `ready` sessions that pays.

        The rule is that of the worker's `LatencyProfile.best_batch` and `LeastCreditFirst`: a batch of b pays
        against a smaller one of a when b / L(b) is at least a / L(a) times 1 + g · (b − a) / b, with
        g = max(`LEAST_GAIN`, `GAIN` / ready).
        """
        best = self._best_batches
        while len(best) <= ready:
            count = len(best)
            gain, chosen = max(LEAST_GAIN, GAIN / count), 1
            for size in range(2, count + 1):
                smaller_s, larger_s = self(chosen), self(size)
                # The worker's formula, literally: ties must be broken in the same way.
                wanted = 1 + gain * (size - chosen) / size
                if smaller_s <= 0 or size / larger_s >= chosen / smaller_s * wanted:
                    chosen = size
            best.append(chosen)
        return best[ready]

    def _at(self, sessions: int) -> float:
        measured = self._measured
        at = bisect.bisect_left(measured, (sessions,))
        if at < len(measured) and (measured[at][0] == sessions or at == 0):
            return measured[at][1]
        if len(measured) == 1:
            return measured[0][1] * sessions / max(measured[0][0], 1)
        (low, low_s), (high, high_s) = measured[at - 1 : at + 1] if at < len(measured) else measured[-2:]
        slope = (high_s - low_s) / (high - low)
        if at == len(measured):
            slope = max(slope, 0.0)
        return low_s + slope * (sessions - low)


def slots(curve: LatencyCurve, capacity: int, target_s: float | None) -> int:
    """Return K: the sessions within `capacity` whose chunk latency is at most `target_s`; at least one.

    Without `target_s` or without measurements, K is `capacity`.
    """
    if target_s is None or capacity <= 1 or not curve.measured:
        return max(capacity, 0)
    return max(1, curve.most(target_s, capacity))


def with_loan_s(curve: LatencyCurve, sessions: int, *, lends: bool) -> float:
    """Return L(sessions) of a worker, with the part that it computes of another worker's session."""
    return curve(sessions) + LENT_SHARE * curve(1) if lends else curve(sessions)


LENT_SHARE = 0.5
"""Part of the time of a lone chunk that a loan takes on the donor's device: half of the tokens and heads."""
LOWERED, SUSPECT = 0.5, 1.0
"""First elements of the keys of targets that are a last resort. Migrations for balance do not use them."""
NO_WORKER = WorkerState(id="", model="", capacity=0, ready=False)


class PoolEntry:
    """One worker that exists or that a session names, and the sessions on it."""

    __slots__ = (
        "as_candidate",
        "coming",
        "curve",
        "floor_curve",
        "floor_slots",
        "going",
        "here",
        "id",
        "node",
        "slots",
        "state",
        "suspended",
    )

    def __init__(self, name: str) -> None:
        self.id = name
        self.state = NO_WORKER
        self.node = ""
        """The node of the worker's host: see `node_of`."""
        self.floor_curve = self.curve = LatencyCurve({}, 0)
        """`floor_curve`: L(n) at the fastest configuration that the worker may choose."""
        self.slots = 0
        """K: number of slots."""
        self.floor_slots = 0
        """K_floor within the target chunk latency, but not below K."""
        self.here: set[str] = set()
        """Sessions whose rows hold a slot on the worker."""
        self.coming: set[str] = set()
        """Sessions that have a slot reserved on the worker, by a placement or a migration to it."""
        self.going: set[str] = set()
        """The sessions in `here` that are on their way to another worker."""
        self.suspended: set[str] = set()
        """Suspended sessions whose state is on the worker or is migrating to it."""
        self.as_candidate: Candidate | None = None
        """What `Cluster.candidates` returned for it. None: the worker or its sessions have changed."""

    def become(self, state: WorkerState, target_s: float | None) -> None:
        before, self.state = self.state, state
        self.as_candidate = None
        if state.host != before.host:
            self.node = node_of(state.host)
        if state.chunk_latency_s != before.chunk_latency_s or state.capacity != before.capacity:
            self.curve = LatencyCurve(state.chunk_latency_s, state.capacity)
            self.slots = slots(self.curve, state.capacity, target_s)
        self.floor_slots = self.slots
        self.floor_curve = self.curve
        if min(state.floor_capacity, self.slots) > 0:
            self.floor_curve = floor = LatencyCurve(state.floor_chunk_latency_s, state.floor_capacity)
            self.floor_slots = max(slots(floor, state.floor_capacity, target_s), self.slots)

    @property
    def limit(self) -> int:
        """Sessions that the worker may hold as a last resort: K_floor while it absorbs, otherwise K."""
        return self.floor_slots if self.state.absorbs else self.slots

    @property
    def held(self) -> int:
        """Number of slots in use or reserved. A migration under way counts at source and target."""
        return len(self.here) + len(self.coming)

    @property
    def staying(self) -> int:
        """Number of sessions on the worker once all migrations and placements under way are done."""
        return len(self.here) + len(self.coming) - len(self.going)

    def with_more_s(self, sessions: int) -> float:
        """Return the chunk latency as a target that then has so many sessions, in seconds.

        What the worker lends counts: further sessions would end the loan, and the session that borrows would
        be late. The worker's own sessions do not wait for a loan, so no other latency counts it.
        """
        return with_loan_s(self.curve, sessions, lends=self.state.lends)

    @property
    def candidate(self) -> bool:
        """Whether the worker may get sessions if it has room."""
        return self.state.ready and not self.state.draining

    def fits(self, model: str, weights_digest: str | None) -> bool:
        """Whether the worker has the model and the weights (None: any weights)."""
        return self.state.model == model and weights_digest in (None, self.state.weights_digest)

    @property
    def serves(self) -> bool:
        """Whether sessions may migrate to the worker, and from it for balance."""
        return self.candidate and not self.state.suspect

    def target_item(self, added: int = 0) -> Item | None:
        """Return the worker's sort key among targets, with `added` more sessions on it.

        Order: workers with a slot, then those that hold more than K sessions at lower fidelity, then
        suspects; then the lower chunk latency with one more session, then the lower load, then the lower id.
        Latency and load are those of full fidelity. None: the worker is full or takes no sessions.
        """
        held = self.held + added
        if held >= self.slots:
            if held >= self.limit or not self.serves:
                return None
            return (LOWERED, self.with_more_s(held + 1), held / self.slots, self.id)
        if not self.candidate:
            return None
        last = SUSPECT if self.state.suspect else 0.0
        return (last, self.with_more_s(held + 1), held / self.slots, self.id)


class Pool:
    """Rankings of the workers between which sessions can migrate.

    `targets` and `near` rank by `PoolEntry.target_item`, whose second element is a latency in seconds.
    """

    def __init__(self) -> None:
        self.ready = 0
        """Number of workers that may get sessions if they have room."""
        self.targets = Ranking()
        """Workers with room, by `PoolEntry.target_item`. Workers of the last resort are at the end."""
        self.near: dict[tuple[LinkKind, str], Ranking] = {}
        """`targets` by host and by node, without suspects."""
        self.tops = Ranking()
        """Serving workers with sessions by (− latency, id), so the bottleneck is first."""
        self.spare = Ranking()
        """Serving workers with at least two sessions by (− latency with one session less, id), so the worker
        that stays slowest after losing a session is first."""
        self.suspended_ranking = Ranking()
        """Serving workers by (sessions per slot, suspended ones included; id): targets of suspended
        sessions."""
        self.late = Ranking()
        """Serving workers that expect late chunks, by (− number, id). See `Urgency.refresh`."""
        self.relaxed = Ranking()
        """Serving workers with room, by (late chunks that an urgent session more would cause, latency with
        one session more, id). Workers that do not report slack are missing. See `Urgency.refresh`."""
        self.draining: set[str] = set()
        """Workers that are draining."""
        self.migrating: set[str] = set()
        """Sessions that migrate."""

    @property
    def bottleneck_s(self) -> float:
        """L: the worst chunk latency in seconds, once all that is under way is done."""
        return -float(self.tops.items[0][0]) if self.tops.items else 0.0

    def rank(self, entry: PoolEntry) -> None:
        """Update the worker's place in all rankings."""
        name, state, curve, serves = entry.id, entry.state, entry.curve, entry.serves
        item = entry.target_item()
        self.targets.put(name, item)
        if state.host:
            self._rank_near(entry, item if serves else None)
        held = entry.held
        staying = held - len(entry.going)
        self.tops.put(name, (-curve(staying), name) if serves and staying > 0 else None)
        self.spare.put(name, (-curve(staying - 1), name) if serves and staying > 1 else None)
        ranked = serves and entry.slots
        load = (held + len(entry.suspended)) / entry.slots if ranked else 0.0
        self.suspended_ranking.put(name, (load, name) if ranked else None)
        if state.draining:
            self.draining.add(name)
        else:
            self.draining.discard(name)

    def forget(self, entry: PoolEntry) -> None:
        """Remove the worker from all rankings."""
        for ranking in (self.targets, self.tops, self.spare, self.suspended_ranking, self.late, self.relaxed):
            ranking.put(entry.id, None)
        self._rank_near(entry, None)
        self.draining.discard(entry.id)

    def neighbours(self, kind: LinkKind, host: str) -> Ranking | None:
        """Return the targets that a link of `kind` or a nearer one joins with `host`, or None."""
        if kind is LinkKind.ACROSS:
            return self.targets
        return self.near.get((kind, host if kind is LinkKind.HOST else node_of(host))) if host else None

    def _rank_near(self, entry: PoolEntry, item: Item | None) -> None:
        """Rank the worker in `near` of its host and node."""
        if entry.state.host:
            for place in ((LinkKind.HOST, entry.state.host), (LinkKind.NODE, entry.node)):
                self.near.setdefault(place, Ranking()).put(entry.id, item)

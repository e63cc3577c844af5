"""Workers of one model with the same weights, in the rankings that decisions use."""

from __future__ import annotations

from turboserve.scheduler.placement.latency import LatencyCurve, slots
from turboserve.scheduler.placement.links import LinkKind, node_of
from turboserve.scheduler.placement.ranking import Item, Ranking
from turboserve.scheduler.placement.states import WorkerState

NO_WORKER = WorkerState(id="", model="", capacity=0, ready=False)


class PoolEntry:
    """One worker that exists or that a session names, and the sessions on it."""

    __slots__ = ("coming", "curve", "going", "here", "id", "slots", "state", "suspended")

    def __init__(self, name: str) -> None:
        self.id = name
        self.state = NO_WORKER
        self.curve = LatencyCurve({}, 0)
        self.slots = 0
        """K: number of slots."""
        self.here: set[str] = set()
        """Sessions whose rows hold a slot on the worker."""
        self.coming: set[str] = set()
        """Sessions that have a slot reserved on the worker, by a placement or a migration to it."""
        self.going: set[str] = set()
        """The sessions in `here` that are on their way to another worker."""
        self.suspended: set[str] = set()
        """Suspended sessions whose state is on the worker or is migrating to it."""

    def become(self, state: WorkerState, target_s: float | None) -> None:
        before, self.state = self.state, state
        if state.chunk_latency_s != before.chunk_latency_s or state.capacity != before.capacity:
            self.curve = LatencyCurve(state.chunk_latency_s, state.capacity)
            self.slots = slots(self.curve, state.capacity, target_s)

    @property
    def held(self) -> int:
        """Number of slots in use or reserved. A migration under way counts at source and target."""
        return len(self.here) + len(self.coming)

    @property
    def staying(self) -> int:
        """Number of sessions on the worker once all migrations and placements under way are done."""
        return len(self.here) + len(self.coming) - len(self.going)

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

        Order: suspects last, then the lower chunk latency with one more session, then the lower load, then
        the lower id. None: the worker is full or takes no sessions.
        """
        held = self.held + added
        if held >= self.slots or not self.candidate:
            return None
        return (float(self.state.suspect), self.curve(held + 1), held / self.slots, self.id)


class Pool:
    """Rankings of the workers between which sessions can migrate.

    `targets` and `near` rank by `PoolEntry.target_item`, whose second element is a latency in seconds.
    """

    def __init__(self) -> None:
        self.ready = 0
        """Number of workers that may get sessions if they have room."""
        self.targets = Ranking()
        """Workers with room, by `PoolEntry.target_item`."""
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
        name, state, serves = entry.id, entry.state, entry.serves
        item = entry.target_item()
        self.targets.put(name, item)
        if state.host:
            local = item if serves else None
            self._near(LinkKind.HOST, state.host).put(name, local)
            self._near(LinkKind.NODE, node_of(state.host)).put(name, local)
        staying = entry.staying
        self.tops.put(name, (-entry.curve(staying), name) if serves and staying > 0 else None)
        spare = serves and staying > 1
        self.spare.put(name, (-entry.curve(staying - 1), name) if spare else None)
        takes = serves and entry.slots > 0
        self.suspended_ranking.put(
            name, ((entry.held + len(entry.suspended)) / entry.slots, name) if takes else None
        )
        if state.draining:
            self.draining.add(name)
        else:
            self.draining.discard(name)

    def forget(self, entry: PoolEntry) -> None:
        """Remove the worker from all rankings."""
        state = entry.state
        for ranking in (self.targets, self.tops, self.spare, self.suspended_ranking):
            ranking.put(entry.id, None)
        if state.host:
            self._near(LinkKind.HOST, state.host).put(entry.id, None)
            self._near(LinkKind.NODE, node_of(state.host)).put(entry.id, None)
        self.draining.discard(entry.id)

    def neighbours(self, kind: LinkKind, host: str) -> Ranking | None:
        """Return the targets that a link of `kind` or a nearer one joins with `host`, or None."""
        if kind is LinkKind.ACROSS:
            return self.targets
        return self.near.get((kind, host if kind is LinkKind.HOST else node_of(host))) if host else None

    def _near(self, kind: LinkKind, name: str) -> Ranking:
        return self.near.setdefault((kind, name), Ranking())

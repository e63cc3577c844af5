"""Workers of one model with the same weights, ranked by everything that a decision asks for."""

from __future__ import annotations

from turboserve.scheduler.placement.latency import LatencyCurve, slots
from turboserve.scheduler.placement.links import LinkKind, node_of
from turboserve.scheduler.placement.ranking import Item, Ranking
from turboserve.scheduler.placement.states import WorkerState

NO_WORKER = WorkerState(id="", model="", capacity=0, ready=False)


class PoolEntry:
    """One worker that exists or that a session names, and who is on it."""

    __slots__ = ("coming", "curve", "going", "here", "id", "slots", "state", "suspended")

    def __init__(self, name: str) -> None:
        self.id = name
        self.state = NO_WORKER
        self.curve = LatencyCurve({}, 0)
        self.slots = 0
        """K."""
        self.here: set[str] = set()
        """Sessions whose rows hold a slot here."""
        self.coming: set[str] = set()
        """Sessions that have a slot reserved here: placed, or moving here."""
        self.going: set[str] = set()
        """Of those that are here, the ones that are on their way to another worker."""
        self.suspended: set[str] = set()
        """Suspended sessions whose state is here, or is moving here."""

    def become(self, state: WorkerState, target_s: float | None) -> None:
        before, self.state = self.state, state
        if state.chunk_latency_s != before.chunk_latency_s or state.capacity != before.capacity:
            self.curve = LatencyCurve(state.chunk_latency_s, state.capacity)
            self.slots = slots(self.curve, state.capacity, target_s)

    @property
    def held(self) -> int:
        """Slots in use or reserved: moves under way count at both ends."""
        return len(self.here) + len(self.coming)

    @property
    def staying(self) -> int:
        """Sessions that will be here once all that is under way is done."""
        return len(self.here) + len(self.coming) - len(self.going)

    @property
    def candidate(self) -> bool:
        """Whether it may be given sessions, if it has room."""
        return self.state.ready and not self.state.draining

    def fits(self, model: str, weights_digest: str | None) -> bool:
        """Whether it has the model and the weights (None: any)."""
        return self.state.model == model and weights_digest in (None, self.state.weights_digest)

    @property
    def serves(self) -> bool:
        """Whether sessions may be moved to it, and from it for balance."""
        return self.candidate and not self.state.suspect

    def target_item(self, added: int = 0) -> Item | None:
        """Order of targets, with `added` more sessions on it: suspects last, then where the chunk latency
        with one more is least, then the smaller load, then by id. None: it is full or takes none."""
        held = self.held + added
        if held >= self.slots or not self.candidate:
            return None
        return (float(self.state.suspect), self.curve(held + 1), held / self.slots, self.id)


class Pool:
    """Rankings of the workers between which sessions can move.

    An item's second place in `targets` and `near` is a latency.
    """

    def __init__(self) -> None:
        self.ready = 0
        """Workers that may be given sessions if they have room."""
        self.targets = Ranking()
        self.near: dict[tuple[LinkKind, str], Ranking] = {}
        """The same by host and by node, without suspects."""
        self.tops = Ranking()
        """(− latency, id): the bottleneck first. Only workers that serve."""
        self.spare = Ranking()
        """(− latency with one session less, id): who would still be slowest after giving one away first. Only
        workers that serve and have two sessions or more."""
        self.suspended_ranking = Ranking()
        """(sessions and suspended ones per slot, id): where suspended sessions go."""
        self.draining: set[str] = set()
        """Workers to be emptied."""
        self.moving: set[str] = set()
        """Sessions that are on their way from a worker to another."""

    @property
    def bottleneck_s(self) -> float:
        """L: the worst chunk latency, once all that is under way is done."""
        return -float(self.tops.items[0][0]) if self.tops.items else 0.0

    def rank(self, entry: PoolEntry) -> None:
        """Bring its places up to date."""
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
        """Take it out of all rankings."""
        state = entry.state
        for ranking in (self.targets, self.tops, self.spare, self.suspended_ranking):
            ranking.put(entry.id, None)
        if state.host:
            self._near(LinkKind.HOST, state.host).put(entry.id, None)
            self._near(LinkKind.NODE, node_of(state.host)).put(entry.id, None)
        self.draining.discard(entry.id)

    def neighbours(self, kind: LinkKind, host: str) -> Ranking | None:
        """Targets that a link of `kind` or a nearer one joins with `host`; None: there are none."""
        if kind is LinkKind.ACROSS:
            return self.targets
        return self.near.get((kind, host if kind is LinkKind.HOST else node_of(host))) if host else None

    def _near(self, kind: LinkKind, name: str) -> Ranking:
        return self.near.setdefault((kind, name), Ranking())

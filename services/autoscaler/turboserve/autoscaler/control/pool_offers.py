"""The offers of a pool that has several: kinds of workers with one model each, and what is known of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.autoscaler.control.composition import Offer, OfferKey, Terms

AVOIDED_S = 60.0
"""Time for which no worker of an offer is hired whose workers failed, if another offer has the same model. It
doubles each time until one is stable."""
AVOIDED_LIMIT_S = 3_600.0

Sizes = Mapping[str, int]
"""Number of workers by offer."""


@dataclass(frozen=True)
class PoolOffer:
    """Workers of one kind with one model."""

    name: str
    kind: str
    model: str
    sessions: int
    """Sessions of one such worker, until one has reported its K."""
    least: int = 0
    """Minimum number of such workers."""

    @property
    def key(self) -> OfferKey:
        return self.kind, (self.model,)

    @property
    def session_class(self) -> SessionClass:
        return SessionClass.of_name(self.model)


@dataclass(frozen=True)
class OfferState:
    """The workers of one offer."""

    ready: int = 0
    """Workers that serve and stay."""
    leaving: int = 0
    """Workers that are not wanted any more and have not ended. Not those that are stuck."""
    sessions: int = 0
    """Sessions that hold a slot of the workers, as the store has counted them."""
    suspended: int = 0
    """Sessions whose state is in the host memory of the workers."""
    failing: bool = False
    """Whether a wanted worker has failed more than once in a row."""
    capacity: int | None = None
    """K of the ready workers, the smallest one. None: none is known."""
    starting: int = 0
    """Wanted workers that are not ready and have not failed more than once in a row."""
    stuck: int = 0
    """Workers that should have ended long ago and hold no session. They occupy their hardware."""
    blocked: int = 0
    """Workers that should have ended long ago and still hold sessions."""
    unheard: int = 0
    """Wanted workers that this process found running and that have not reported yet. None that is stuck."""
    stable_since: float | None = None
    """When the newest of the stable workers became ready. None: none is stable."""


@dataclass(frozen=True)
class OffersObserved:
    """The present workers of each offer, by its name."""

    states: Mapping[str, OfferState]


EMPTY = OfferState()


@dataclass(frozen=True)
class _Avoidance:
    """A time for which no worker of an offer is hired."""

    since: float
    for_s: float

    @property
    def until(self) -> float:
        return self.since + self.for_s


def without_place(sessions: Mapping[str, int], places: Mapping[str, int]) -> int:
    """Return how many sessions have no place, both by model."""
    return sum(max(count - places.get(model, 0), 0) for model, count in sessions.items())


class OfferWorkers:
    """The offers, K of each, and their present workers."""

    def __init__(self, offers: Sequence[PoolOffer], terms: Mapping[str, Terms]) -> None:
        self.offers = {offer.name: offer for offer in offers}
        self.names = {offer.key: offer.name for offer in offers}
        self.models = tuple(dict.fromkeys(offer.model for offer in offers))
        self.terms = terms
        self.capacity = {offer.name: offer.sessions for offer in offers}
        """K by offer: as last reported, and before that as declared."""
        self.seen = False
        """Whether the workers have been observed."""
        self._states: Mapping[str, OfferState] = {}
        self._now = -math.inf
        self._avoidances: dict[str, _Avoidance] = {}
        """The last one of each offer without a stable worker since then."""

    def observe(self, states: Mapping[str, OfferState], now: float) -> None:
        """Note the present workers."""
        self._states, self.seen, self._now = states, True, now
        for name, state in states.items():
            if state.capacity is not None and state.capacity > 0:
                self.capacity[name] = state.capacity
            last = self._avoidances.get(name)
            if last is not None and state.stable_since is not None and state.stable_since > last.since:
                del self._avoidances[name]
                last = None
            if state.failing and self._has_alternative(name) and (last is None or last.until <= now):
                for_s = AVOIDED_S if last is None else min(2 * last.for_s, AVOIDED_LIMIT_S)
                self._avoidances[name] = _Avoidance(now, for_s)

    def _has_alternative(self, name: str) -> bool:
        model = self.offers[name].model
        return any(other.model == model and other.name != name for other in self.offers.values())

    @property
    def ready(self) -> dict[str, int]:
        """Workers that serve and stay, by offer."""
        return {name: self._state(name).ready for name in self.offers}

    def with_held(self, live: Mapping[str, int]) -> dict[str, int]:
        """Return the live sessions of each model, and no fewer than the store has counted on its workers.

        So lost reports about one model take no place from its sessions. The states of suspended sessions
        count as one session: without a worker of their model, the last one never ends its drain.
        """
        held, suspended = Counter[str](), Counter[str]()
        for name, offer in self.offers.items():
            held[offer.model] += self._state(name).sessions
            suspended[offer.model] += self._state(name).suspended
        return {model: max(count, held[model], int(suspended[model] > 0)) for model, count in live.items()}

    @property
    def leaving(self) -> bool:
        """Whether a worker drains or ends."""
        return any(state.leaving for state in self._states.values())

    @property
    def unheard(self) -> bool:
        """Whether a worker that was found running has not reported yet: it may be ready, with sessions."""
        return any(state.unheard for state in self._states.values())

    def most(self, name: str) -> int | None:
        """Return the maximum of an offer whose workers fail: the other ones of it. None: no such limit."""
        last, state = self._avoidances.get(name), self._state(name)
        return None if last is None or last.until <= self._now else state.ready + state.starting

    def offer(self, name: str, *, avoids: bool = True) -> Offer:
        """Return the offer as the composition counts it. `avoids`: none is hired whose workers fail."""
        offer, most = self.offers[name], self.most(name) if avoids else None
        capability = Capability({offer.session_class: self.capacity[name]})
        least = offer.least if most is None else min(offer.least, most)
        return Offer(offer.kind, (offer.model,), capability, least, most)

    def places(self, sizes: Sizes) -> Counter[str]:
        """Return the places of so many workers, by model."""
        places = Counter[str]()
        for name, count in sizes.items():
            places[self.offers[name].model] += count * self.capacity[name]
        return places

    def short(self, sizes: Sizes, sessions: Mapping[str, int]) -> int:
        """Return how many of these sessions, by model, have no place on so many workers."""
        return without_place(sessions, self.places(sizes))

    def keeps_places(self, now: Sizes, after: Sizes, sessions: Mapping[str, int]) -> bool:
        """Whether every session that has a place on the workers `now` has one on those `after`."""
        before, left = self.places(now), self.places(after)
        return all(left[model] >= min(count, before[model]) for model, count in sessions.items())

    def of_kind(self, kind: str, sizes: Sizes, model: str) -> int:
        """Return the workers of a kind that are wanted or have not ended, before one with `model` is hired.

        A worker that should have ended and holds sessions of the model is left out: it may wait for the very
        worker that is to be hired.
        """
        found = 0
        for name, offer in self.offers.items():
            if offer.kind == kind:
                state = self._state(name)
                blocked = 0 if offer.model == model else state.blocked
                found += sizes[name] + state.leaving + state.stuck + blocked
        return found

    @property
    def terms_now(self) -> dict[str, Terms]:
        """Terms of each kind, with the maximum that the workers which cannot be ended leave."""
        found = {}
        for kind, terms in self.terms.items():
            names = [name for name, offer in self.offers.items() if offer.kind == kind]
            least = sum(self.offers[name].least for name in names)
            left = terms.most - sum(self._state(name).stuck for name in names)
            found[kind] = replace(terms, most=max(left, least))
        return found

    def maximum(self, model: str, sizes: Sizes, live: Mapping[str, int]) -> int:
        """Return how many workers may serve a model.

        Workers of other models that their live sessions need are left out.
        """
        own = {name: offer for name, offer in self.offers.items() if offer.model == model}
        found, terms = 0, self.terms_now
        for kind in {offer.kind for offer in own.values()}:
            taken = 0
            for name, offer in self.offers.items():
                if offer.kind == kind and offer.model != model:
                    needed = math.ceil(live[offer.model] / self.capacity[name])
                    taken += min(sizes[name], max(needed, offer.least))
            found += terms[kind].most - taken
        return max(found, sum(sizes[name] for name in own))

    def _state(self, name: str) -> OfferState:
        return self._states.get(name, EMPTY)

"""The offers of a pool that has several: kinds of workers with one model each, and what is known of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.autoscaler.control.composition import Offer, OfferKey, Terms

AVOIDED_S = 60.0
"""Time for which no worker of an offer is hired whose workers failed, if another offer has the same model."""

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
    """Workers that are not wanted any more and have not ended. Not those whose drain is stuck: it may wait
    for the very worker that is to be hired."""
    sessions: int = 0
    """Sessions that hold a slot of the workers, as the store has counted them."""
    suspended: int = 0
    """Sessions whose state is in the host memory of the workers."""
    failing: bool = False
    """Whether a wanted worker has failed more than once in a row."""
    capacity: int | None = None
    """K of the ready workers, the smallest one. None: none is known."""


@dataclass(frozen=True)
class OffersObserved:
    """The present workers of each offer, by its name."""

    states: Mapping[str, OfferState]


EMPTY = OfferState()


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
        self._avoided: dict[str, float] = {}
        """Offer whose workers fail → when they may be hired again."""

    def observe(self, states: Mapping[str, OfferState], now: float) -> None:
        """Note the present workers."""
        self._states, self.seen = states, True
        self._avoided = {name: until for name, until in self._avoided.items() if until > now}
        for name, state in states.items():
            if state.capacity is not None and state.capacity > 0:
                self.capacity[name] = state.capacity
            if state.failing and self._has_alternative(name):
                self._avoided.setdefault(name, now + AVOIDED_S)

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

    def most(self, name: str) -> int | None:
        """Return the maximum of an offer whose workers fail: those that are ready. None: no such limit."""
        return self._state(name).ready if name in self._avoided else None

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
        places = self.places(sizes)
        return sum(max(count - places[model], 0) for model, count in sessions.items())

    def keeps_places(self, now: Sizes, after: Sizes, sessions: Mapping[str, int]) -> bool:
        """Whether every session that has a place on the workers `now` has one on those `after`."""
        before, left = self.places(now), self.places(after)
        return all(left[model] >= min(count, before[model]) for model, count in sessions.items())

    def of_kind(self, kind: str, sizes: Sizes) -> int:
        """Return the workers of a kind that are wanted or have not ended."""
        names = [name for name, offer in self.offers.items() if offer.kind == kind]
        return sum(sizes[name] + self._state(name).leaving for name in names)

    def maximum(self, model: str, sizes: Sizes, live: Mapping[str, int]) -> int:
        """Return how many workers may serve a model.

        Workers of other models that their live sessions need are left out.
        """
        own = {name: offer for name, offer in self.offers.items() if offer.model == model}
        found = 0
        for kind in {offer.kind for offer in own.values()}:
            taken = 0
            for name, offer in self.offers.items():
                if offer.kind == kind and offer.model != model:
                    needed = math.ceil(live[offer.model] / self.capacity[name])
                    taken += min(sizes[name], max(needed, offer.least))
            found += self.terms[kind].most - taken
        return max(found, sum(sizes[name] for name in own))

    def _state(self, name: str) -> OfferState:
        return self._states.get(name, EMPTY)

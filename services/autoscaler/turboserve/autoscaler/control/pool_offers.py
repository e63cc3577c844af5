"""The offers of a pool that has several: kinds of workers with their models, and what is known of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.autoscaler.control.composition import Offer, OfferKey, Terms
from turboserve.autoscaler.control.session_places import keeps_places, without_place

AVOIDED_S = 60.0
"""Time for which no worker of an offer is hired whose workers failed, if another offer has the same model. It
doubles each time until one is stable."""
AVOIDED_LIMIT_S = 3_600.0

Sizes = Mapping[str, int]
"""Number of workers by offer."""
Switch = tuple[str, str]
"""Offer of a worker that ends, and offer of the worker that takes its place."""


@dataclass(frozen=True)
class PoolOffer:
    """Workers of one kind with one model, or with several that each worker serves at once."""

    name: str
    kind: str
    sessions: Mapping[str, int]
    """n_j by model: sessions of the model that one such worker serves alone, until one has reported it."""
    least: int = 0
    """Minimum number of such workers."""

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self.sessions)

    @property
    def key(self) -> OfferKey:
        return self.kind, self.models


@dataclass(frozen=True)
class OfferState:
    """The workers of one offer."""

    ready: int = 0
    """Workers that serve and stay."""
    leaving: int = 0
    """Workers that are not wanted any more and have not ended. Not those that are stuck."""
    sessions: Mapping[str, int] = field(default_factory=dict)
    """Sessions of each model that hold a slot of the workers, as the store has counted them."""
    suspended: int = 0
    """Sessions whose state is in the host memory of the workers."""
    failing: bool = False
    """Whether a wanted worker has failed more than once in a row."""
    capacity: Mapping[str, int] = field(default_factory=dict)
    """n_j of the ready workers by model, the smallest ones. A missing model: none is known."""
    starting: int = 0
    """Wanted workers that are not ready and have not failed more than once in a row."""
    switching: int = 0
    """Workers in `leaving` whose place is for a wanted worker of another offer."""
    vacating: int = 0
    """Workers in `leaving` that drained before this process began, and whose place nothing waits for."""
    stranded: int = 0
    """Wanted workers that wait for the place of a worker which should have ended long ago."""
    stuck: int = 0
    """Workers that should have ended long ago and hold no session. They occupy their hardware. Not those
    for whose place another one waits."""
    blocked: int = 0
    """As `stuck`, but they still hold sessions."""
    blocked_models: frozenset[str] = frozenset()
    """Models of the sessions that those in `blocked` hold."""
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


class OfferWorkers:
    """The offers, n_j of each, and their present workers."""

    def __init__(self, offers: Sequence[PoolOffer], terms: Mapping[str, Terms]) -> None:
        self.offers = {offer.name: offer for offer in offers}
        self.names = {offer.key: offer.name for offer in offers}
        self.models = tuple(dict.fromkeys(model for offer in offers for model in offer.models))
        self.terms = terms
        self.capacity = {offer.name: dict(offer.sessions) for offer in offers}
        """n_j by offer and model: as last reported, and before that as declared."""
        self.seen = False
        """Whether the workers have been observed."""
        self._states: Mapping[str, OfferState] = {}
        self._now = -math.inf
        self._taken: Counter[str] = Counter()
        """Places of workers in `vacating` that were taken after the last look, by offer."""
        self._avoidances: dict[str, _Avoidance] = {}
        """The last one of each offer without a stable worker since then."""

    def observe(self, states: Mapping[str, OfferState], now: float) -> None:
        """Note the present workers."""
        self._states, self.seen, self._now = states, True, now
        self._taken.clear()
        for name, state in states.items():
            known = self.capacity[name]
            known.update(
                (model, most) for model, most in state.capacity.items() if model in known and most > 0
            )
            last = self._avoidances.get(name)
            if last is not None and state.stable_since is not None and state.stable_since > last.since:
                del self._avoidances[name]
                last = None
            if state.failing and self._has_alternative(name) and (last is None or last.until <= now):
                for_s = AVOIDED_S if last is None else min(2 * last.for_s, AVOIDED_LIMIT_S)
                self._avoidances[name] = _Avoidance(now, for_s)

    def _has_alternative(self, name: str) -> bool:
        others = {model for other in self.offers.values() if other.name != name for model in other.models}
        return others.issuperset(self.offers[name].models)

    @property
    def ready(self) -> dict[str, int]:
        """Workers that serve and stay, by offer."""
        return {name: self._state(name).ready for name in self.offers}

    def with_held(self, live: Mapping[str, int]) -> dict[str, int]:
        """Return the live sessions of each model, and no fewer than the store has counted on its workers.

        So lost reports about one model take no place from its sessions. The states of suspended sessions
        count as one session of each model of their worker: without a worker of their model, the last one
        never ends its drain.
        """
        held, suspended = Counter[str](), Counter[str]()
        for name, offer in self.offers.items():
            held.update(self._state(name).sessions)
            suspended.update(dict.fromkeys(offer.models, self._state(name).suspended))
        return {model: max(count, held[model], int(suspended[model] > 0)) for model, count in live.items()}

    @property
    def leaving(self) -> bool:
        """Whether a worker drains or ends."""
        return any(state.leaving for state in self._states.values())

    @property
    def stranded(self) -> dict[str, int]:
        """Wanted workers that wait for a place that is not given up, by offer. Offers without any are left
        out."""
        return {name: state.stranded for name, state in self._states.items() if state.stranded}

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
        served = {SessionClass.of_name(model): most for model, most in self.capacity[name].items()}
        least = offer.least if most is None else min(offer.least, most)
        return Offer(offer.kind, offer.models, Capability(served), least, most)

    def short(self, sizes: Sizes, sessions: Mapping[str, int]) -> int:
        """Return how many of these sessions, by model, have no place on so many workers."""
        return sum(without_place(self._workers(sizes), sessions).values())

    def keeps_places(self, now: Sizes, after: Sizes, sessions: Mapping[str, int]) -> bool:
        """Whether every session that has a place on the workers `now` has one on those `after`."""
        return keeps_places(self._workers(now), self._workers(after), sessions)

    def _workers(self, sizes: Sizes) -> list[tuple[Mapping[str, int], int]]:
        return [(self.capacity[name], count) for name, count in sizes.items()]

    def of_kind(self, kind: str, sizes: Sizes, hired: str) -> int:
        """Return the workers of a kind that are wanted or have not ended, before one of the offer `hired` is.

        Workers that should have ended and hold sessions are left out if the one that is hired serves all
        models of these: they may wait for that very worker.
        """
        models = set(self.offers[hired].models)
        found = 0
        for name, offer in self.offers.items():
            if offer.kind == kind:
                state = self._state(name)
                blocked = 0 if models.issuperset(state.blocked_models) else state.blocked
                # The place of one that switches counts with the offer of the worker that waits for it.
                found += sizes[name] + state.leaving - state.switching + state.stuck + blocked
        return found

    def take_place(self, hired: str) -> str | None:
        """Take the place of a worker that drained before this process began, for one of the offer `hired`.

        No step of a plan is stored. So a worker that drains may be that of a switch which an earlier process
        began. Returns its offer, which is another one of the same kind; None if there is none.
        """
        kind = self.offers[hired].kind
        for name, offer in self.offers.items():
            if offer.kind == kind and name != hired and self._state(name).vacating > self._taken[name]:
                self._taken[name] += 1
                return name
        return None

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

    def of_model(self, model: str, sizes: Sizes) -> int:
        """Return how many of these workers serve a model."""
        return sum(sizes[name] for name, offer in self.offers.items() if model in offer.models)

    def capacity_numbers(self) -> Iterator[tuple[str, int]]:
        """Return n_j of each offer, with a name for a decision's record."""
        for name, served in self.capacity.items():
            for model, most in served.items():
                yield f"sessions_per_worker {name}{f' {model}' if len(served) > 1 else ''}", most

    def maximum(self, model: str, sizes: Sizes, live: Mapping[str, int]) -> int:
        """Return how many workers may serve a model.

        Workers of other models that their live sessions need are left out.
        """
        own = {name: offer for name, offer in self.offers.items() if model in offer.models}
        found, terms = 0, self.terms_now
        for kind in {offer.kind for offer in own.values()}:
            taken = 0
            for name, offer in self.offers.items():
                if offer.kind == kind and model not in offer.models:
                    parts = (Fraction(live[one], most) for one, most in self.capacity[name].items())
                    needed = math.ceil(sum(parts))
                    taken += min(sizes[name], max(needed, offer.least))
            found += terms[kind].most - taken
        return max(found, self.of_model(model, sizes))

    def _state(self, name: str) -> OfferState:
        return self._states.get(name, EMPTY)

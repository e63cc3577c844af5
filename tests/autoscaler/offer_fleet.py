"""A pool with several offers in virtual time: workers that start, drain or never start."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from turboserve.autoscaler.control.composition import Terms
from turboserve.autoscaler.control.composition_controller import CompositionController
from turboserve.autoscaler.control.composition_goal import answer_to
from turboserve.autoscaler.control.events import ControlTick, Event, FeedbackReceived
from turboserve.autoscaler.control.policy import ControlPolicy, default_table
from turboserve.autoscaler.control.pool_offers import OffersObserved, OfferState, PoolOffer
from turboserve.autoscaler.control.session_places import with_place, without_place
from turboserve.contracts.pool import LoadFeedback

POLICY = ControlPolicy(
    least=0, most=4, horizon_s=3.0, peak_window_s=10.0, in_cooldown_s=2.0, out_cooldown_s=1.0, stale_s=5.0
)
TERMS = {
    "big": Terms(price=4.0, most=2, start_s=5.0, switch_s=5.0),
    "small": Terms(price=1.0, most=2, start_s=5.0, switch_s=5.0),
}
OFFERS = (
    PoolOffer("wide", "big", {"large": 4}),
    PoolOffer("tiny", "small", {"light": 3}),
    PoolOffer("both", "big", {"light": 12}),
)
START_S, DRAIN_S = 4, 2


def handle(controller: CompositionController, event: Event | OffersObserved, now: float) -> None:
    """Pass an event to the controller, and what it asks to the solver, which takes no time."""
    controller.handle(event, now)
    while (problem := controller.problem()) is not None:
        controller.handle(answer_to(problem), now)


class Fleet:
    """Workers that start and drain in fixed times, and a scheduler that reports every second."""

    def __init__(
        self,
        sizes: Mapping[str, int] | None = None,
        policy: ControlPolicy = POLICY,
        terms: Mapping[str, Terms] = TERMS,
        offers: Sequence[PoolOffer] = OFFERS,
    ) -> None:
        self.controller = CompositionController(policy, default_table(), offers, terms, sizes or {})
        self.now = 0
        self.live: Counter[str] = Counter()
        self.workers: dict[str, list[float]] = {
            offer.name: [0] * (sizes or {}).get(offer.name, 0) for offer in offers
        }
        """When each wanted worker is ready, by offer. Infinity: never."""
        self.leaving: list[tuple[str, int]] = []
        self.switching: list[tuple[str, int]] = []
        """Those in `leaving` whose place another worker takes."""
        self.fails: set[str] = set()
        self.held: Counter[str] = Counter()
        """Sessions on the workers of an offer, as the store has counted them."""
        self.suspended: Counter[str] = Counter()
        self.reasons: list[str] = []
        self.silent = False

    @property
    def sizes(self) -> dict[str, int]:
        return {name: size for name, size in self.controller.sizes.items() if size}

    def ready(self) -> dict[str, int]:
        return {name: sum(at <= self.now for at in found) for name, found in self.workers.items()}

    def places(self) -> Counter[str]:
        return self.places_of(self.ready())

    def places_of(self, sizes: Mapping[str, int]) -> Counter[str]:
        """Places of so many workers, for each model alone."""
        found = Counter[str]()
        for name, count in sizes.items():
            found.update({one: most * count for one, most in self.controller.workers.capacity[name].items()})
        return found

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.leaving = [(name, at) for name, at in self.leaving if at > self.now]
            self.switching = [(name, at) for name, at in self.switching if at > self.now]
            leaving = Counter(name for name, _ in self.leaving)
            switching = Counter(name for name, _ in self.switching)
            states = {
                name: OfferState(
                    count,
                    leaving[name],
                    dict.fromkeys(self.controller.workers.offers[name].models, self.held[name]),
                    self.suspended[name],
                    name in self.fails and count < len(self.workers[name]),
                    starting=sum(self.now < at < math.inf for at in self.workers[name]),
                    switching=switching[name],
                )
                for name, count in self.ready().items()
            }
            self.controller.handle(OffersObserved(states), float(self.now))
            for model in () if self.silent else self.reported():
                self.decide(FeedbackReceived(self.load(model)))
            self.decide(ControlTick())

    def reported(self) -> list[str]:
        """Models that a worker serves or a session wants."""
        served = self.places_of({name: len(found) for name, found in self.workers.items()})
        return [model for model in self.controller.workers.models if served[model] or self.live[model]]

    def load(self, model: str) -> LoadFeedback:
        places, live = self.places()[model], self.live[model]
        waiting = max(live - places, 0)
        rho = min(live / places, 1.0) if places else 0.0
        workers = sum(
            n for name, n in self.ready().items() if model in self.controller.workers.offers[name].models
        )
        shared = any(
            model in offer.models and len(offer.models) > 1
            for offer in self.controller.workers.offers.values()
        )
        return LoadFeedback(
            model=model,
            rho_max=rho,
            # Sessions of other classes take slots of this one where workers serve both.
            required=self.live.total() if shared else live,
            own_required=live if shared else None,
            waiting=waiting,
            capacity=places,
            workers=workers,
            at=self.now,
        )

    def decide(self, event: Event) -> None:
        before, ready = dict(self.controller.sizes), self.ready()
        handle(self.controller, event, float(self.now))
        switches = self.controller.switches()
        self.switching += [(name, self.now + DRAIN_S) for name, _ in switches]
        fewer = [name for name, size in self.controller.sizes.items() if size < before[name]]
        for name, size in self.controller.sizes.items():
            found = self.workers[name]
            while len(found) < size:
                waits_s = DRAIN_S if name in dict(switches).values() else 0
                found.append(math.inf if name in self.fails else self.now + waits_s + START_S)
            while len(found) > size:
                # As the pool does: first a worker that is not ready.
                found.remove(max(found))
                self.leaving.append((name, self.now + DRAIN_S))
        # One worker at a time leaves, and every live session keeps its place.
        assert len(self.leaving) <= 1
        if fewer:
            self.reasons.append(self.controller.decisions[-1].reason)
            capacity = self.controller.workers.capacity
            placed = with_place([(capacity[name], count) for name, count in ready.items()], self.live)
            stay = [(capacity[name], count) for name, count in self.ready().items()]
            assert not without_place(stay, placed), (before, self.controller.sizes)
        for kind, terms in TERMS.items():
            own = [name for name, offer in self.controller.workers.offers.items() if offer.kind == kind]
            living = sum(len(self.workers[name]) for name in own)
            leaving = [name for name, _ in self.leaving if name in own]
            assert living + len(leaving) - sum(name in own for name, _ in self.switching) <= terms.most

"""The composition that a pool should have, and the plan of the way there."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from turboserve.allocation.classes import SessionClass
from turboserve.allocation.linear import SolverError
from turboserve.autoscaler.control.composition import CompositionPolicy, Terms, decide
from turboserve.autoscaler.control.pool_offers import OfferWorkers, Sizes
from turboserve.autoscaler.control.transition import Step, plan

LEAST_GAIN = 1e-6
"""Peaks and cool-downs are the hysteresis: one worker of a large pool is less than any share of its cost."""
FREE = 0.01
"""What a worker without a price counts, as a part of the cheapest price: so no more run than are needed."""
SHORTAGE_PRICE = 100.0
"""Least price of a session without a place for an hour. It exceeds that of every worker."""

Sessions = Mapping[str, int]
"""Number of sessions by model."""


@dataclass(frozen=True)
class _Situation:
    """What a goal depends on."""

    sizes: Sizes
    live: Sessions
    expected: Sessions
    capacity: Sizes
    most: Mapping[str, int | None]
    terms: Mapping[str, Terms]
    total: int | None


class CompositionGoal:
    """Finds the goal and the plan anew whenever something has changed that they depend on."""

    def __init__(self, workers: OfferWorkers, sizes: Sizes) -> None:
        self._workers = workers
        dearest = max((terms.price for terms in workers.terms.values()), default=0.0)
        self._policy = CompositionPolicy(
            utilization=1.0,
            least_gain=LEAST_GAIN,
            shortage_price=max(SHORTAGE_PRICE, 10.0 * dearest),
            gap=0.0,
        )
        self._terms: Mapping[str, Terms] = {}
        self.sizes: dict[str, int] = dict(sizes)
        """The sizes to have."""
        self.cost = self.present_cost = 0.0
        """Costs of them and of the present sizes over the horizon, as the decision counted them."""
        self.steps: deque[Step] = deque()
        """The steps from the present sizes to these."""
        self.complete = True
        """Whether the steps lead there. False: no further step leaves every session a place."""
        self._situation: _Situation | None = None

    def update(self, present: Sizes, live: Sessions, expected: Sessions, total: int | None) -> None:
        """Decide for the present sizes, the live and the expected sessions. Raises SolverError.

        `total`: number of workers that an operator has ordered; None: as many as are worth their price.
        """
        workers = self._workers
        most = {name: workers.most(name) for name in workers.offers}
        self._terms = _priced(workers.terms_now)
        situation = _Situation(
            dict(present), live, expected, dict(workers.capacity), most, self._terms, total
        )
        if situation == self._situation:
            return
        avoids = any(one is not None for one in most.values())
        found = self._solved_without_failing(present, live, expected, total) if avoids else None
        if found is None:
            avoids = False
            found = self._solved(present, expected, total, avoids=False)
        sizes, cost, present_cost = found
        if workers.short(sizes, expected) and expected != live:
            # A peak that is over must not keep a place from a session that is there.
            other = self._solved(present, live, total, avoids=avoids)
            if workers.short(other[0], live) < workers.short(sizes, live):
                sizes, cost, present_cost = other
        changed, self.sizes, self.cost, self.present_cost = sizes != self.sizes, sizes, cost, present_cost
        self._situation = situation
        if changed or not any(step.extra for step in self.steps):
            # A plan with a worker for the time of the transition is kept, or that worker would be released.
            self._plan(present, live)

    def _solved_without_failing(
        self, present: Sizes, live: Sessions, expected: Sessions, total: int | None
    ) -> tuple[dict[str, int], float, float] | None:
        """Solve without further workers of offers that fail. None: they are tried again.

        The other offers have too few places, or fewer workers than an operator has ordered.
        """
        try:
            found = self._solved(present, expected, total)
        except SolverError:
            return None
        return None if self._workers.short(found[0], live) else found

    def _solved(
        self, present: Sizes, sessions: Sessions, total: int | None, *, avoids: bool = True
    ) -> tuple[dict[str, int], float, float]:
        workers = self._workers
        offers = [workers.offer(name, avoids=avoids) for name in workers.offers]
        forecast = {SessionClass.of_name(model): float(count) for model, count in sessions.items()}
        found = decide(self._terms, offers, self._by_key(present), forecast, self._policy, total)
        sizes = {name: found.composition.get(offer.key, 0) for name, offer in workers.offers.items()}
        return sizes, found.cost, found.present_cost

    def _plan(self, present: Sizes, live: Sessions) -> None:
        workers = self._workers
        found = plan(
            self._terms,
            [workers.offer(name, avoids=False) for name in workers.offers],
            self._by_key(present),
            self._by_key(self.sizes),
            {SessionClass.of_name(model): count for model, count in live.items()},
        )
        self.steps, self.complete = deque(found.steps), found.complete

    def _by_key(self, sizes: Sizes) -> dict[tuple[str, tuple[str, ...]], int]:
        return {offer.key: sizes[name] for name, offer in self._workers.offers.items()}


def _priced(terms: Mapping[str, Terms]) -> dict[str, Terms]:
    free = FREE * min((one.price for one in terms.values() if one.price), default=1.0)
    return {kind: replace(one, price=one.price or free) for kind, one in terms.items()}

"""The composition that a pool should have, and the plan of the way there.

A `GoalProblem` has everything that they depend on, so a thread can solve it (`solve`) while events go on.
`CompositionGoal` says when there is a new problem, and whether the last answer still is of the present.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from turboserve.allocation.classes import SessionClass
from turboserve.allocation.linear import SolverError
from turboserve.autoscaler.control.composition import CompositionPolicy, Offer, OfferKey, Terms, decide
from turboserve.autoscaler.control.pool_offers import OfferWorkers, Sizes
from turboserve.autoscaler.control.session_places import without_place
from turboserve.autoscaler.control.transition import Step, plan

LEAST_GAIN = 1e-6
"""Peaks and cool-downs are the hysteresis: one worker of a large pool is less than any share of its cost."""
FREE = 0.01
"""What a worker without a price counts, as a part of the cheapest price: so no more run than are needed."""
SHORTAGE_PRICE = 100.0
"""Least price of a session without a place for an hour. It exceeds that of every worker."""
SILENT_S = 10.0
"""Time after which a solver without an answer counts as failed, until it answers."""
ROUNDS = 3
"""Number of compositions that are tried until whole sessions have a place on workers of several models."""
RETRY_S = 5.0
"""Time from a problem that was not solved to the next one. Other offers, sizes or orders do not wait."""

Sessions = Mapping[str, int]
"""Number of sessions by model."""


@dataclass(frozen=True)
class GoalProblem:
    """What a goal and its plan depend on."""

    sizes: Sizes
    """The present sizes."""
    live: Sessions
    expected: Sessions
    offers: Mapping[str, Offer]
    limited: Mapping[str, Offer]
    """The offers, without further workers of those that fail."""
    terms: Mapping[str, Terms]
    policy: CompositionPolicy
    total: int | None
    """Number of workers that an operator has ordered. None: as many as are worth their price."""

    def differs_in_demand_alone(self, other: GoalProblem) -> bool:
        """Whether both have the same sizes, offers, prices and orders."""
        return replace(self, live=other.live, expected=other.expected) == other

    def short(self, sizes: Sizes, sessions: Sessions) -> int:
        """Return how many of these sessions, by model, have no place on so many workers."""
        return sum(self.without_place(sizes, sessions).values())

    def without_place(self, sizes: Sizes, sessions: Sessions) -> dict[SessionClass, int]:
        """As `short`, by class."""
        wanted = {SessionClass.of_name(model): count for model, count in sessions.items()}
        return without_place(
            ((self.offers[name].capability.sessions, count) for name, count in sizes.items()), wanted
        )

    @property
    def shares_workers(self) -> bool:
        """Whether a worker may serve several models."""
        return any(len(offer.models) > 1 for offer in self.offers.values())


@dataclass(frozen=True)
class FoundGoal:
    """The solution of a problem."""

    sizes: Sizes
    """The sizes to have."""
    cost: float
    present_cost: float
    """Costs of them and of the present sizes over the horizon, as the decision counted them."""
    steps: Sequence[Step]
    """The steps from the present sizes to these."""
    complete: bool
    """Whether the steps lead there. False: no further step leaves every session a place."""


@dataclass(frozen=True)
class GoalAnswered:
    """What came of a problem that `CompositionController.problem` returned."""

    problem: GoalProblem
    found: FoundGoal | None
    """None: it was not solved."""
    error: str = ""


@dataclass(frozen=True)
class _Answer:
    problem: GoalProblem
    found: FoundGoal


def answer_to(problem: GoalProblem) -> GoalAnswered:
    """Solve a problem. Whatever goes wrong is in the answer."""
    try:
        return GoalAnswered(problem, solve(problem))
    except Exception as error:
        return GoalAnswered(problem, None, str(error) or repr(error))


def solve(problem: GoalProblem) -> FoundGoal:
    """Return the cheapest sizes for the expected sessions, and the steps to them. Raises SolverError."""
    avoids = problem.limited != problem.offers
    found = _without_failing(problem) if avoids else None
    if found is None:
        avoids = False
        found = _decided(problem, problem.expected, problem.offers)
    sizes, cost, present_cost = found
    if problem.short(sizes, problem.expected) and problem.expected != problem.live:
        # A peak that is over must not keep a place from a session that is there.
        other = _decided(problem, problem.live, problem.limited if avoids else problem.offers)
        if problem.short(other[0], problem.live) < problem.short(sizes, problem.live):
            sizes, cost, present_cost = other
    way = plan(
        problem.terms,
        list(problem.offers.values()),
        _by_key(problem, problem.sizes),
        _by_key(problem, sizes),
        {SessionClass.of_name(model): count for model, count in problem.live.items()},
    )
    return FoundGoal(sizes, cost, present_cost, tuple(way.steps), way.complete)


def _without_failing(problem: GoalProblem) -> tuple[dict[str, int], float, float] | None:
    """Solve without further workers of offers that fail. None: they are tried again.

    The other offers have too few places, or fewer workers than an operator has ordered.
    """
    try:
        found = _decided(problem, problem.expected, problem.limited)
    except SolverError:
        return None
    return None if problem.short(found[0], problem.live) else found


def _decided(
    problem: GoalProblem, sessions: Sessions, offers: Mapping[str, Offer]
) -> tuple[dict[str, int], float, float]:
    forecast = {SessionClass.of_name(model): float(count) for model, count in sessions.items()}
    present = _by_key(problem, problem.sizes)
    for _ in range(ROUNDS if problem.shares_workers else 1):
        found = decide(problem.terms, list(offers.values()), present, forecast, problem.policy, problem.total)
        sizes = {name: found.composition.get(offer.key, 0) for name, offer in offers.items()}
        if not problem.shares_workers:
            break
        # The program gives parts of a session to several workers. Those that then lack a place are added.
        lacking = problem.without_place(sizes, sessions)
        if sum(lacking.values()) <= math.ceil(sum(found.shortage.values()) - LEAST_GAIN):
            break
        forecast = {one: count + lacking.get(one, 0) for one, count in forecast.items()}
    return sizes, found.cost, found.present_cost


def _by_key(problem: GoalProblem, sizes: Sizes) -> dict[OfferKey, int]:
    return {offer.key: sizes[name] for name, offer in problem.offers.items()}


class CompositionGoal:
    """The last goal, and the problem to solve next. No clock, and no solver."""

    def __init__(self, workers: OfferWorkers, sizes: Sizes) -> None:
        self._workers = workers
        dearest = max((terms.price for terms in workers.terms.values()), default=0.0)
        self._policy = CompositionPolicy(
            utilization=1.0,
            least_gain=LEAST_GAIN,
            shortage_price=max(SHORTAGE_PRICE, 10.0 * dearest),
        )
        self.sizes: Sizes = dict(sizes)
        """The sizes to have."""
        self.cost = self.present_cost = 0.0
        self.steps: deque[Step] = deque()
        self.complete = True
        self.failed: str | None = None
        """Why the last problem was not solved. None: it was."""
        self.problem: GoalProblem | None = None
        """The problem to solve now. The caller clears it, and `answered` has to follow."""
        self._solved: GoalProblem | None = None
        self._tried: GoalProblem | None = None
        """The last problem that was to be solved."""
        self._under_way: GoalProblem | None = None
        self._asked_at = -math.inf
        self._answer: _Answer | None = None
        """The answer that has not been compared with the present."""

    def is_solved(
        self, sizes: Sizes, live: Sessions, expected: Sessions, total: int | None, now: float
    ) -> bool:
        """Whether there is a goal whose steps may be taken now. If not, there may be a new `problem`.

        An answer counts if sizes, offers, prices and orders are still those of its problem. Sessions may have
        come and gone: each step is compared with the present ones, and the next problem has them.
        """
        present = self._present(sizes, live, expected, total)
        answer, self._answer = self._answer, None
        if answer is not None and answer.problem.differs_in_demand_alone(present):
            self._use(answer.problem, answer.found)
            return True
        if present == self._solved:
            return True
        if self._under_way is not None:
            if now - self._asked_at > SILENT_S:
                self.failed = f"the solver has not answered for {SILENT_S:g} s"
        elif self._tried is None or self._may_try(present, self._tried, now):
            self.problem = self._under_way = self._tried = present
            self._asked_at = now
        return False

    def answered(self, answer: GoalAnswered) -> None:
        """Note an answer. Any but that to the problem under way is ignored."""
        if answer.problem is not self._under_way:
            return
        self._under_way = None
        self.failed = answer.error if answer.found is None else None
        self._answer = None if answer.found is None else _Answer(answer.problem, answer.found)

    def _may_try(self, present: GoalProblem, tried: GoalProblem, now: float) -> bool:
        if self.failed is None or now - self._asked_at >= RETRY_S:
            return True
        return not present.differs_in_demand_alone(tried)

    def _use(self, problem: GoalProblem, found: FoundGoal) -> None:
        self._solved = problem
        changed, self.sizes = found.sizes != self.sizes, found.sizes
        self.cost, self.present_cost = found.cost, found.present_cost
        if changed or not any(step.extra for step in self.steps):
            # A plan with a worker for the time of the transition is kept, or that worker would be released.
            self.steps, self.complete = deque(found.steps), found.complete

    def _present(self, sizes: Sizes, live: Sessions, expected: Sessions, total: int | None) -> GoalProblem:
        workers = self._workers
        return GoalProblem(
            dict(sizes),
            dict(live),
            dict(expected),
            {name: workers.offer(name, avoids=False) for name in workers.offers},
            {name: workers.offer(name) for name in workers.offers},
            _priced(workers.terms_now),
            self._policy,
            total,
        )


def _priced(terms: Mapping[str, Terms]) -> dict[str, Terms]:
    free = FREE * min((one.price for one in terms.values() if one.price), default=1.0)
    return {kind: replace(one, price=one.price or free) for kind, one in terms.items()}

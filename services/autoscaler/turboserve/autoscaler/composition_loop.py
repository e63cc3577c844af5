"""The control loop of a pool with several offers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from turboserve import logs
from turboserve.autoscaler.control import events
from turboserve.autoscaler.control.composition_controller import CompositionController
from turboserve.autoscaler.control.composition_goal import GoalAnswered, GoalProblem
from turboserve.autoscaler.control.pool_offers import OffersObserved, OfferState
from turboserve.autoscaler.control_loop import ControlLoop
from turboserve.autoscaler.pool_members import PoolMember
from turboserve.contracts.autoscale import ProfileTable
from turboserve.contracts.pool import LoadFeedback, PoolMemberPhase

log = logs.get("autoscaler")
STUCK_S = 30.0
"""Time in one phase after which a worker that should end, or that was found running, is stuck, seconds."""
STABLE_S = 30.0
"""Time for which a worker is ready until it is stable, seconds."""
FAILURES = 2
"""Failures in a row from which a pool member's offer counts as failing."""


class CompositionLoop(ControlLoop):
    """Feeds the controller of a pool with several offers, and passes its sizes by offer to the pool."""

    def __init__(
        self,
        controller: CompositionController,
        shipped: ProfileTable,
        override: int | None,
        resize: Callable[[Mapping[str, int], str], None],
        members: Callable[[], Iterable[PoolMember]],
        solve: Callable[[GoalProblem, Callable[[GoalAnswered, float], None]], None],
    ) -> None:
        """`members` returns the pool's members. Each decision sees the present ones.

        `solve` gets a problem, and later calls the function that it gets with the answer and the time.
        """
        models = controller.workers.models
        super().__init__(controller, models[0], shipped, override, lambda size, reason: None, models[1:])
        self._composition = controller
        self._resize_offers, self._members, self._solve = resize, members, solve
        self._last_sizes = dict(controller.sizes)

    @property
    def maximum(self) -> int:
        """Number of workers that may serve the first model."""
        return self._composition.maxima()[self.model]

    @property
    def decode_sessions(self) -> int | None:
        """See `ControlLoop.decode_sessions`. Decode workers do not limit the number of workers here."""
        return None

    @property
    def further_models(self) -> dict[str, tuple[str, int]]:
        offers, found = self._composition.workers.offers, {}
        for model, maximum in self._composition.maxima().items():
            if model != self.model:
                # A model may have a name as long as that of a row: the first of its offers has a short one.
                first = next(name for name, offer in offers.items() if offer.model == model)
                found[first] = model, maximum
        return found

    def is_full(self, model: str) -> bool:
        """Whether the pool has as many workers for a model as may serve it."""
        offers = self._composition.workers.offers
        sizes = self._composition.sizes
        present = sum(sizes[name] for name, offer in offers.items() if offer.model == model)
        return present >= self._composition.maxima()[model]

    def accepted(self, now: float) -> dict[str, LoadFeedback]:
        """Return the newest load feedback of each model that was reported lately."""
        return self._composition.demand.accepted(now)

    def on_feedback(self, feedback: LoadFeedback, now: float) -> None:
        """Feed the scheduler's load feedback. Feedback about models that no offer has is ignored."""
        if feedback.model in self._composition.workers.models:
            self._handle(events.FeedbackReceived(feedback), now)

    def _handle(self, event: Any, now: float) -> None:
        if self.orders is None:
            return
        members = list(self._members())
        states = {name: _state(members, name, now) for name in self._composition.sizes}
        self._composition.handle(OffersObserved(states), now)
        decision = self._composition.handle(event, now)
        if decision is not None:
            log.info("scaling", action=decision.action.value, target=decision.target, reason=decision.reason)
        sizes = dict(self._composition.sizes)
        if sizes != self._last_sizes:
            grown = any(size > self._last_sizes[name] for name, size in sizes.items())
            self._last_sizes = sizes
            with self._span(decision, now, grown=grown):
                self._resize_offers(sizes, decision.reason if decision is not None else "the controller")
        problem = self._composition.problem()
        if problem is not None:
            self._solve(problem, self._handle)


def _state(members: Iterable[PoolMember], offer: str, now: float) -> OfferState:
    ours = [member for member in members if member.offer == offer]
    ready = [member for member in ours if member.wanted and member.phase is PoolMemberPhase.READY]
    failures = [
        member.failures for member in ours if member.wanted and member.phase is not PoolMemberPhase.READY
    ]
    ending = [member for member in ours if not member.wanted]
    stuck = [member for member in ending if now - member.since > STUCK_S]
    blocked = sum(member.phase is PoolMemberPhase.DRAINING and member.held > 0 for member in stuck)
    unheard = sum(
        member.wanted
        and member.adopted
        and member.phase is PoolMemberPhase.LAUNCHING
        and now - member.since <= STUCK_S
        for member in ours
    )
    ready_at = [member.ready_at for member in ready if member.ready_at is not None]
    return OfferState(
        ready=len(ready),
        leaving=len(ending) - len(stuck),
        sessions=sum(member.sessions for member in ours),
        suspended=sum(member.suspended for member in ours),
        failing=any(count >= FAILURES for count in failures),
        capacity=min((member.own_capacity for member in ready if member.own_capacity), default=None),
        starting=sum(count < FAILURES for count in failures),
        stuck=len(stuck) - blocked,
        blocked=blocked,
        unheard=unheard,
        stable_since=max((at for at in ready_at if now - at >= STABLE_S), default=None),
    )

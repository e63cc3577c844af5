"""The control loop of a pool with several offers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from turboserve import logs
from turboserve.autoscaler.control import events
from turboserve.autoscaler.control.composition_controller import CompositionController
from turboserve.autoscaler.control.composition_goal import GoalAnswered, GoalProblem
from turboserve.autoscaler.control.pool_offers import OffersObserved, OfferState, PoolOffer, Switch
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
        resize: Callable[[Mapping[str, int], str, tuple[Switch, ...]], None],
        members: Callable[[], Iterable[PoolMember] | None],
        solve: Callable[[GoalProblem, Callable[[GoalAnswered, float], None]], None],
    ) -> None:
        """`members` returns the pool's members, or None before the pool has adopted the workers that run.
        Each decision sees the present ones. None is made before: what runs seems to have ended, and the pool
        could not start a worker in the place of one that it does not know yet.

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
        return max(self._composition.maxima()[self.model] - self._counted_elsewhere(self.model), 0)

    @property
    def decode_sessions(self) -> int | None:
        """See `ControlLoop.decode_sessions`. Decode workers do not limit the number of workers here."""
        return None

    @property
    def further_models(self) -> dict[str, tuple[str, int]]:
        found = {}
        for model, maximum in self._composition.maxima().items():
            if model != self.model:
                found[self._row_name(model)] = model, max(maximum - self._counted_elsewhere(model), 0)
        return found

    def _row_name(self, model: str) -> str:
        """Return a name for a model's row. A model may have one that is as long as that of a row, so it is
        that of its first offer, with the model's position there if it is not the first."""
        offers = self._composition.workers.offers.values()
        first = next(offer for offer in offers if model in offer.models)
        position = first.models.index(model)
        return f"{first.name}-{position}" if position else first.name

    def _counted_elsewhere(self, model: str) -> int:
        """Return how many ready workers serve the model and others before it.

        The state store leaves out of a model's maximum the ready workers whose first class is the model, and
        counts the room of workers of several classes apart.
        """
        offers, ready = self._composition.workers.offers, self._composition.workers.ready
        return sum(ready[name] for name, offer in offers.items() if model in offer.models[1:])

    def is_full(self, model: str) -> bool:
        """Whether the pool has as many workers for a model as may serve it."""
        present = self._composition.workers.of_model(model, self._composition.sizes)
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
        members, observed = self._members(), list[OffersObserved]()
        if members is not None:
            present = list(members)
            offers = self._composition.workers.offers.values()
            observed.append(OffersObserved({offer.name: _state(present, offer, now) for offer in offers}))
        decision = None
        for each in (*observed, event):
            found = self._composition.handle(each, now)
            if found is not None:
                decision = found
                log.info("scaling", action=found.action.value, target=found.target, reason=found.reason)
        sizes = dict(self._composition.sizes)
        if sizes != self._last_sizes:
            grown = any(size > self._last_sizes[name] for name, size in sizes.items())
            self._last_sizes = sizes
            with self._span(decision, now, grown=grown):
                reason = decision.reason if decision is not None else "the controller"
                self._resize_offers(sizes, reason, self._composition.switches())
        problem = self._composition.problem()
        if problem is not None:
            self._solve(problem, self._handle)


def _capacity(ready: Iterable[PoolMember], model: str) -> int | None:
    return min((most for member in ready if (most := member.capacity_of(model))), default=None)


def _state(members: Iterable[PoolMember], offer: PoolOffer, now: float) -> OfferState:
    ours = [member for member in members if member.offer == offer.name]
    ready = [member for member in ours if member.wanted and member.phase is PoolMemberPhase.READY]
    failures = [
        member.failures for member in ours if member.wanted and member.phase is not PoolMemberPhase.READY
    ]
    ending = [member for member in ours if not member.wanted]
    stuck = [member for member in ending if now - member.since > STUCK_S]
    awaited = {member.waits_for for member in members if member.wanted and member.waits_for is not None}
    switching = [member for member in ending if member.name in awaited]
    vacating = sum(
        member.found_draining and member not in stuck and member not in switching for member in ending
    )
    switching_stuck = sum(member in stuck for member in switching)
    blocked = [
        member
        for member in stuck
        if member.phase is PoolMemberPhase.DRAINING and member.held > 0 and member.name not in awaited
    ]
    late = {member.name for member in members if not member.wanted and now - member.since > STUCK_S}
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
        switching=len(switching) - switching_stuck,
        vacating=vacating,
        stranded=sum(member.wanted and member.waits_for in late for member in ours),
        sessions={model: sum(member.sessions_of(model) for member in ours) for model in offer.models},
        suspended=sum(member.suspended for member in ours),
        failing=any(count >= FAILURES for count in failures),
        capacity={model: least for model in offer.models if (least := _capacity(ready, model)) is not None},
        starting=sum(count < FAILURES for count in failures),
        stuck=len(stuck) - len(blocked) - switching_stuck,
        blocked=len(blocked),
        blocked_models=frozenset(
            model for member in blocked for model in offer.models if member.may_hold(model)
        ),
        unheard=unheard,
        stable_since=max((at for at in ready_at if now - at >= STABLE_S), default=None),
    )

"""The controller of a pool with several offers: how many workers of which kind have which models.

A pure core like `Controller`, whose orders, dry run and records it shares: an event and its time in, sizes by
offer and an explanation out. A decision has these steps:

1. *Expect* the sessions of each class (`ClassDemand`).
2. *Decide* the cheapest composition with places for them (`CompositionGoal`). If not all have a place, a peak
   that is over yields to sessions that are there.
3. *Plan* the way there, make before break (`transition`).
4. *Take* the next steps. Workers are hired at once. One worker at a time is released or switched, if the
   ready ones that stay have a place for every live session that has one now. A switch gives the place of
   the worker that ends to one of the other offer (`switches`), so no further one is hired for it. So does
   a worker that drained before this process began: it may be that of a switch.

Steps 2 and 3 may take seconds. So `handle` does not solve: `problem` has what is to be solved, and the answer
is an event. Until it comes, the sizes stay.

The plan lives in memory only. A new process plans anew, and so does each change of demand or workers. So a
lost command or a failed start needs no repair of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from turboserve.autoscaler.control.class_demand import ClassDemand
from turboserve.autoscaler.control.composition import Terms
from turboserve.autoscaler.control.composition_goal import (
    CompositionGoal,
    GoalAnswered,
    GoalProblem,
    Sessions,
)
from turboserve.autoscaler.control.controller import Controller
from turboserve.autoscaler.control.events import (
    ControlTick,
    Decision,
    DryRunSet,
    Event,
    FeedbackReceived,
    ScalingAction,
    SessionChanged,
)
from turboserve.autoscaler.control.headroom import Headroom
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.autoscaler.control.pool_offers import (
    OffersObserved,
    OfferWorkers,
    PoolOffer,
    Sizes,
    Switch,
)
from turboserve.autoscaler.control.remembered_offers import recall_offers, remembered
from turboserve.autoscaler.control.transition import Step, StepKind
from turboserve.contracts.autoscale import LevelParameters, ProfileTable
from turboserve.contracts.pool import LoadFeedback
from turboserve.wording import counted

FULL = LevelParameters(
    level=1, volatility_from=0.0, latency_weight=0.2, target_utilization=1.0, predictive=True
)
"""What the status shows: the forecast's quantile is the headroom, so no slots are kept beside it."""
PASSING = frozenset({"steady", "cooling", "leaving", "settling", "adopting"})
"""Causes to wait that recur at every change. They are not recorded as decisions."""
NUMBERS_LIMIT = 64
"""Most numbers of a decision's record."""


class CompositionController(Controller):
    """Decides the sizes of a pool's offers. `sizes` are initially those that run."""

    def __init__(
        self,
        policy: ControlPolicy,
        table: ProfileTable,
        offers: Sequence[PoolOffer],
        terms: Mapping[str, Terms],
        sizes: Sizes,
    ) -> None:
        self.workers = OfferWorkers(offers, terms)
        self.sizes = {name: sizes.get(name, 0) for name in self.workers.offers}
        super().__init__(replace(policy, learns=False), table, sum(self.sizes.values()))
        self.demand = ClassDemand(self.workers.models, policy)
        self.goal = CompositionGoal(self.workers, self.sizes)
        self._live: Sessions = dict.fromkeys(self.workers.models, 0)
        self._expected: Sessions = self._live
        self._grew_at = self._shrank_at = -math.inf
        self._released = False
        """Whether a worker was released or switched after the last look at the workers."""
        self._switches: list[Switch] = []
        self.advisor.use(Headroom(FULL, policy.peak_window_s, policy.quantile))

    def problem(self) -> GoalProblem | None:
        """Return the problem to solve now, once. `GoalAnswered` has to follow. None: there is no new one."""
        problem, self.goal.problem = self.goal.problem, None
        return problem

    def switches(self) -> tuple[Switch, ...]:
        """Return the switches since the last call. `sizes` has them already."""
        found, self._switches = tuple(self._switches), []
        return found

    def handle(self, event: Event | OffersObserved | GoalAnswered, now: float) -> Decision | None:
        """Process one event at monotonic time `now` (seconds); returns a decision if there is a new one."""
        match event:
            case GoalAnswered():
                self.goal.answered(event)
            case OffersObserved(states):
                self.workers.observe(states, now)
                self._released = False
                return self._give_up_stranded(now)
            case FeedbackReceived(feedback):
                if not self._heard(feedback, now):
                    return None
            case SessionChanged(kind, sessions):
                self.detector.add(kind, sessions, now)
                return None
            case DryRunSet(on):
                self.dry_run = on
            case ControlTick():
                self.detector.advance(now)
            case _:
                return super().handle(event, now)
        return self._compose(now)

    def _heard(self, feedback: LoadFeedback, now: float) -> bool:
        fault = self.demand.update(feedback, now)
        if fault is not None:
            self.advisor.feedback_monitor.refuse(fault, now)
            return False
        self.advisor.update(self.demand.total(feedback, now), now)
        return True

    def _compose(self, now: float) -> Decision | None:
        if not self.workers.seen:
            return None
        if self.override is None and self.demand.is_stale(now):
            return self._hold("stale", f"{self.advisor.feedback_monitor.silence(now)}; the pool stays", now)
        self._live = self.workers.with_held(self.demand.live(now))
        self._expected = self.workers.with_held(self.demand.expected(now))
        if not self.goal.is_solved(self.sizes, self._live, self._expected, self.override, now):
            failed = self.goal.failed
            return None if failed is None else self._hold("solver", f"no composition: {failed}", now)
        self.advice = sum(self.goal.sizes.values())
        if self.dry_run and self.override is None:
            difference = self._difference()
            cause = f"dry run: {difference}" if difference else "steady"
            return self._hold(cause, f"dry run; otherwise {difference}", now)
        return self._advance(now)

    # The way there

    def _advance(self, now: float) -> Decision | None:
        """Take the next steps of the plan, as far as they are possible now."""
        done, waits, steps = list[str](), None, self.goal.steps
        while steps:
            waits = self._waits(steps[0], now, first=not done)
            if waits is not None:
                break
            step = steps.popleft()
            done.append(self._take(step))
            if step.before is not None:
                self._shrank_at, self._released = now, True
                break
        if done:
            previous, target = self.target, sum(self.sizes.values())
            self._grew_at = now if target >= previous else self._grew_at
            self._cause = ""
            resized = ScalingAction.IN if target < previous else ScalingAction.OUT
            switched = step.kind is StepKind.SWITCH and target == previous
            action = ScalingAction.SWITCH if switched else resized
            return self._note(action, target, f"{', '.join(done)}: {self._why()}", now, self.advice)
        if waits is not None:
            return self._hold(waits[0], f"{self._difference()}, but {waits[1]}", now)
        if not self.goal.complete:
            return self._hold("incomplete", "no further step leaves every session a place", now)
        return self._hold("steady", "", now)

    def _give_up_stranded(self, now: float) -> Decision | None:
        """Want no worker whose place is not given up. The next plan may hire it in another one."""
        if not (stranded := self.workers.stranded):
            return None
        for name, count in stranded.items():
            self.sizes[name] = max(self.sizes[name] - count, 0)
        said = f"{', '.join(stranded)}: no place yet, since the worker that it is for still runs"
        return self._note(ScalingAction.IN, sum(self.sizes.values()), said, now, self.advice)

    def _take(self, step: Step) -> str:
        """Apply one step to the sizes. Returns what it does."""
        names = self.workers.names
        if step.before is None:
            assert step.after is not None
            self.sizes[names[step.after]] += 1
            return self._hire(names[step.after], extra=step.extra)
        self.sizes[names[step.before]] -= 1
        if step.after is None:
            return f"release {names[step.before]}"
        self.sizes[names[step.after]] += 1
        self._switches.append((names[step.before], names[step.after]))
        return f"switch {names[step.before]} to {names[step.after]}"

    def _hire(self, name: str, *, extra: bool) -> str:
        if not extra and (place := self.workers.take_place(name)) is not None:
            self._switches.append((place, name))
            return f"hire {name} in the place of a worker of {place} that drains"
        return f"hire {name}{' for the time of the transition' if extra else ''}"

    def _waits(self, step: Step, now: float, *, first: bool) -> tuple[str, str] | None:
        """Return why a step cannot be taken now, as one word and as text. None: it can.

        `first`: no other step was taken just now.
        """
        policy, workers = self.policy, self.workers
        changed_s = now - max(self._grew_at, self._shrank_at)
        if self._released:
            return "leaving", "a worker leaves"
        if step.before is None:
            assert step.after is not None
            kind = step.after[0]
            there = workers.of_kind(kind, self.sizes, workers.names[step.after])
            if there >= workers.terms[kind].most:
                return "room", f"{counted(there, 'worker')} of the kind {kind} run"
            return ("cooling", "cool-down") if first and changed_s < policy.out_cooldown_s else None
        if workers.leaving:
            return "leaving", "a worker leaves"
        if workers.unheard:
            # Their sessions are reported before they are. These would seem to have no place.
            return "adopting", "a worker that was found running has not reported yet"
        ready = workers.ready
        if not workers.short(ready, self._live) and self.override is None:
            # Sessions without a place do not wait for a quiet time.
            if not self.demand.covers_window(now):
                return "settling", f"load reports do not cover the last {policy.peak_window_s:g} s yet"
            if changed_s < policy.in_cooldown_s:
                return "cooling", "cool-down"
        name = workers.names[step.before]
        # The pool gives up workers that are not ready before others.
        fewer = ready | {name: min(ready[name], self.sizes[name] - 1)}
        if not workers.keeps_places(ready, fewer, self._live):
            return "places", "the ready workers that would stay have no place for all sessions"
        return None

    # Orders and records

    def _ordered(self, size: int | None, who: str, now: float) -> Decision | None:
        if size == self.override:
            return None
        self.override = size
        said = f"{who} removed the override" if size is None else f"{who} set {counted(size, 'worker')}"
        return self._note(ScalingAction.OVERRIDE, self.target, said, now, size)

    def _hold(self, cause: str, reason: str, now: float) -> Decision | None:
        """Note why nothing changes, if that begins now and does not recur at every change."""
        begins, self._cause = cause != self._cause, cause
        if not begins or cause in PASSING:
            return None
        return self._note(ScalingAction.HOLD, self.target, reason, now, self.advice)

    def _difference(self) -> str:
        goal = self.goal.sizes
        changes = (f"{name} {size} → {goal[name]}" for name, size in self.sizes.items() if size != goal[name])
        return ", ".join(changes)

    def _why(self) -> str:
        demand = (
            f"{model}: {counted(self._live[model], 'session')}, {self._expected[model]} expected"
            for model in self.workers.models
            if self._live[model] or self._expected[model]
        )
        return "; ".join(demand) or "no sessions are expected"

    def numbers(self) -> dict[str, float]:
        """Return the demand by class, the sizes and n_j by offer, and the costs of the goal."""
        found: dict[str, float] = {"cost": self.goal.cost, "present_cost": self.goal.present_cost}
        for model in self.workers.models:
            found[f"sessions {model}"[:64]] = self._live[model]
            found[f"expected {model}"[:64]] = self._expected[model]
        found.update((f"workers {name}", count) for name, count in self.sizes.items())
        found.update((name[:64], most) for name, most in self.workers.capacity_numbers())
        return dict(islice(found.items(), NUMBERS_LIMIT))

    def maxima(self) -> dict[str, int]:
        """Return how many workers may serve each model, for admission."""
        workers, sizes, found, stays = self.workers, self.sizes, {}, self.dry_run and self.override is None
        for model in workers.models:
            most = workers.of_model(model, sizes) if stays else workers.maximum(model, sizes, self._live)
            found[model] = most if self.override is None else min(most, self.override)
        return found

    def remember(self, wall: float) -> str | None:
        """Return n_j of each offer, as last reported, as text for `recall` of a later process."""
        return remembered(self.workers)

    def recall(self, text: str, wall: float) -> None:
        """Continue from what `remember` of an earlier process returned. Raises LearnedStateError."""
        recall_offers(text, self.workers)

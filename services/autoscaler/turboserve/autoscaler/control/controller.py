"""The autoscaling controller: target tracking with hysteresis, tuned by volatility (TurboServe, 5.2.2).

The input is an event and its time, the output a target and its explanation. No clock, no I/O, no randomness.

A decision has these steps, of which 1 to 4 are those of Appendix A:

1. *Measure* the volatility of new activations (`WorkloadDetector`).
2. *Quantize* it to a level.
3. *Look up* (λ, ρ̂) of the level in the table.
4. *Replace* the parameters in force.
5. Find the right size under these parameters (`Advisor`).
6. Change the target. In a dry run or under an override, only record the advice.

With `ControlPolicy.learns`, steps 1 to 4 are replaced by `HeadroomLearner`, unless an operator has given a
table or quality may be lowered (`quality_debt_limit`).
"""

from __future__ import annotations

from collections import deque

from turboserve.autoscaler.control.advisor import Advisor
from turboserve.autoscaler.control.budget import LatencyOf, compute_bound
from turboserve.autoscaler.control.events import (
    ControlTick,
    Decision,
    DryRunSet,
    Event,
    FeedbackReceived,
    PoolObserved,
    ScalingAction,
    SessionChanged,
    SizeOverridden,
    TableReplaced,
)
from turboserve.autoscaler.control.headroom import Headroom
from turboserve.autoscaler.control.learned_state import parse
from turboserve.autoscaler.control.learner import HeadroomLearner
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.autoscaler.control.start_up import StartUpMeter
from turboserve.autoscaler.control.workload import ACTIVE, WorkloadDetector
from turboserve.contracts.autoscale import ProfileTable
from turboserve.wording import counted

KEPT = 32
NOTED = frozenset({"stale", "packed", "limit", "decode"})
"""Causes to hold that are recorded as decisions when they begin. Other causes recur every second."""


class Controller:
    """Decides the size of one pool of one model. `target` is initially the pool's present size."""

    def __init__(
        self,
        policy: ControlPolicy,
        table: ProfileTable,
        target: int,
        latency: LatencyOf = compute_bound,
    ) -> None:
        self.policy = policy
        self.table = table
        self.target = target
        self.advice = target
        self.override: int | None = None
        self.dry_run = policy.dry_run
        self.detector = WorkloadDetector(policy.epoch_s, policy.window)
        self.learner = HeadroomLearner(policy, target, latency) if policy.learns else None
        self.start_up = StartUpMeter(policy.horizon_s)
        longest_s = self.learner.longest_peak_window_s if self.learner is not None else 0.0
        self.advisor = Advisor(policy, table.row(0.0), latency, longest_s)
        self._shipped = table
        self.decisions: deque[Decision] = deque(maxlen=KEPT)
        self._cause = ""

    def handle(self, event: Event, now: float) -> Decision | None:
        """Process one event at monotonic time `now` (seconds); returns a decision if there is a new one."""
        wakes = False
        match event:
            case FeedbackReceived(feedback):
                if not self.advisor.update(feedback, now):
                    return None
                self._learn(feedback.required, now)
            case SessionChanged(kind, sessions):
                self.detector.add(kind, sessions, now)
                wakes = kind in ACTIVE and self.target == 0 and self.policy.scale_to_zero
                if not wakes:
                    return None
            case PoolObserved():
                self.advisor.pool = event
                self.start_up.observe(event, now)
                return None
            case SizeOverridden(size, who):
                return self._ordered(size, who, now)
            case TableReplaced(table):
                self.table = table
                return self._note(
                    ScalingAction.TABLE, self.target, f"profile: {table.provenance.source}", now
                )
            case DryRunSet(on):
                self.dry_run = on
            case ControlTick():
                pass
        self.detector.advance(now)
        self.advisor.use(self._headroom())
        return self._decide(wakes, now)

    @property
    def learning(self) -> bool:
        """Whether the learned headroom is in force, and not a table."""
        shipped = self.table is self._shipped or self.table == self._shipped
        own = shipped and self.policy.quality_debt_limit <= 0
        return self.learner is not None and own

    def _headroom(self) -> Headroom:
        if self.learner is not None and self.learning:
            return self.learner.headroom
        row = self.table.row(self.detector.volatility)
        return Headroom(row, self.policy.peak_window_s, self.policy.quantile)

    def _learn(self, required: int, now: float) -> None:
        learner = self.learner
        if learner is None or not self.learning:
            return
        if learner.observe(required, self.advisor.capacity, self.start_up.value_s, now):
            self._note(ScalingAction.TABLE, self.target, learner.reason, now)

    def remember(self, wall: float) -> str | None:
        """Return what was learned, as text for `recall` of a later process; None if there is nothing.

        `wall`: Unix seconds.
        """
        state = None if self.learner is None else self.learner.state(self.start_up.measured_s, wall)
        return None if state is None else state.model_dump_json()

    def recall(self, text: str, wall: float) -> None:
        """Continue from what `remember` of an earlier process returned. Raises LearnedStateError.

        Without a learner the text is ignored. `wall`: Unix seconds.
        """
        learner = self.learner
        if learner is None:
            return
        state = parse(text, learner.conditions, len(learner.candidates))
        learner.restore(state, wall)
        self.start_up.restore(state.start_ups_s)

    @property
    def mode(self) -> str:
        """Mode of the controller: auto, override or dry_run."""
        if self.override is not None:
            return "override"
        return "dry_run" if self.dry_run else "auto"

    @property
    def absorbs(self) -> bool:
        """Whether workers may hold more than K sessions, up to K_floor, at lower fidelity.

        They may while capacity is on its way: workers start, or the pool may grow.
        """
        policy, pool = self.policy, self.advisor.pool
        if policy.quality_debt_limit <= 0:
            return False
        may_grow = self.mode == "auto" and self.target < policy.most
        return self.absorbs_at_maximum or may_grow or pool.starting > 0 or pool.ready < self.target

    @property
    def absorbs_at_maximum(self) -> bool:
        """Whether workers may hold more than K sessions although the pool cannot grow."""
        return self.policy.quality_debt_limit > 0 and self.policy.absorb_at_maximum

    def _ordered(self, size: int | None, who: str, now: float) -> Decision | None:
        if size == self.override:
            return None
        self.override = size
        if size is None:
            return self._note(ScalingAction.OVERRIDE, self.target, f"{who} removed the override", now)
        return self._note(ScalingAction.OVERRIDE, size, f"{who} set {counted(size, 'worker')}", now)

    def _decide(self, wakes: bool, now: float) -> Decision | None:
        found = self.advisor.advise(self.target, wakes, now)
        noted, self._cause = found.cause in NOTED and found.cause != self._cause, found.cause
        held = self.override is not None or self.dry_run
        if held and found.size != self.advice:
            mode = self.mode.replace("_", " ")
            what = f"{mode}; otherwise {found.action.value}, {self.target} → {found.size}"
            return self._note(ScalingAction.HOLD, self.target, f"{what}: {found.reason}", now, found.size)
        if not held and found.size != self.target:
            return self._note(found.action, found.size, found.reason, now)
        self.advice = found.size
        return self._note(ScalingAction.HOLD, self.target, found.reason, now, found.size) if noted else None

    def _note(
        self, action: ScalingAction, target: int, reason: str, now: float, advice: int | None = None
    ) -> Decision:
        previous, self.target = self.target, target
        self.advice = target if advice is None else advice
        self.advisor.done(action, target != previous, now)
        decision = Decision(now, action, target, previous, self.advice, reason, self.numbers())
        self.decisions.append(decision)
        return decision

    def numbers(self) -> dict[str, float]:
        """Return the measurements and parameters behind a decision."""
        advisor = self.advisor
        row, feedback = advisor.in_force, advisor.feedback_monitor.feedback
        numbers = {
            "volatility": self.detector.volatility,
            "latency_weight": row.latency_weight,
            "target_utilization": row.target_utilization,
            "sessions_per_worker": advisor.capacity,
        }
        if feedback is not None:
            numbers |= {
                "rho_max": feedback.rho_max,
                "required": feedback.required,
                "waiting": feedback.waiting,
                "capacity": feedback.capacity,
                "workers": feedback.workers,
            }
            if feedback.decoding is not None:
                numbers |= {
                    "denoised": feedback.decoding.denoised,
                    "decode_workers": feedback.decoding.workers,
                    "decode_sessions": feedback.decoding.sessions,
                }
            if self.policy.quality_debt_limit > 0:
                numbers |= {
                    "quality_debt": feedback.quality_debt,
                    "quality_debt_limit": self.policy.quality_debt_limit,
                    "deficit": feedback.deficit,
                    "floor_sessions_per_worker": advisor.floor,
                    "table_target_utilization": advisor.row.target_utilization,
                }
        if self.learner is not None and self.learning:
            numbers |= self.learner.numbers() | {"start_up_s": self.start_up.value_s}
        else:
            numbers["level"] = row.level
        if advisor.predictive and advisor.forecast.value is not None:
            numbers["forecast"] = advisor.forecast.value
        return numbers

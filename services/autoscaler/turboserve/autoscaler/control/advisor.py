"""Advises how many workers a pool should have: the paper's "when" and "how much" (TurboServe, 5.2.2).

- *When*: out if ρ_max > ρ̂ + δ, a worker is full or a session waits; in if the load is below ρ̂ − δ.
- *How much*: to ⌈N_req / (K ρ̂)⌉ workers (`budget`), or to what the forecast needs, whichever is more.

Beyond the paper:

- A scale-in considers the mean load, not ρ_max. A drain rebalances, so one full worker among empty ones is no
  reason to keep them all (with K = 1, ρ_max never falls below 1).
- A scale-in keeps at least the workers needed at any time in `in_window_s`, which `ScaleInBackoff` extends
  after mistakes.
- A scale-in keeps enough slots for the most sessions of `peak_window_s`.
- A scale-in stops where the workers serving now would no longer hold the load inside the band, so that it
  does not have to be undone.
- Both cool-downs count from the last action of either kind.
- Only feedback that is fresh, finite and in order can shrink the pool.
- With a limit of quality debt, a burst may be absorbed by lower quality instead of idle workers
  (`absorption`). Quality debt and deficit scale out, and the pool shrinks only when both are zero. A demand
  that was short on a size keeps a larger one for a while (`shortage`).
- Where decode workers are the limit, no worker is added (`decode_workers`).
"""

from __future__ import annotations

import math
from functools import partial

from turboserve.autoscaler.control import reasons
from turboserve.autoscaler.control.absorption import (
    DEBT_WINDOW_S,
    LATE_CHUNKS,
    QualityPrice,
    floor_of,
    owed,
    peak_slots,
    priced,
)
from turboserve.autoscaler.control.budget import EPSILON, LatencyOf, budget, fullest, would_hold
from turboserve.autoscaler.control.decode_workers import DecodeWorkers, decode_too, decoded, denoised
from turboserve.autoscaler.control.events import Advice, Explain, PoolObserved, ScalingAction
from turboserve.autoscaler.control.feedback_monitor import FeedbackMonitor
from turboserve.autoscaler.control.headroom import Headroom
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.autoscaler.control.reasons import hold, limited
from turboserve.autoscaler.control.scale_in import FARTHEST, Peak, ScaleInBackoff
from turboserve.autoscaler.control.shortage import ShortageMemory
from turboserve.autoscaler.control.triggers import overload
from turboserve.autoscaler.control.workload import Forecast
from turboserve.contracts.autoscale import LevelParameters
from turboserve.contracts.pool import LoadFeedback


class Advisor:
    """Keeps the feedback and past actions, and advises under the parameters in force."""

    def __init__(
        self,
        policy: ControlPolicy,
        row: LevelParameters,
        latency: LatencyOf,
        longest_peak_window_s: float = 0.0,
    ) -> None:
        """`longest_peak_window_s`: the longest window that `use` will ask for, if above the policy's."""
        self.policy = policy
        self.row = row
        """The table's parameters at the present volatility."""
        self._headroom: Headroom | None = None
        self._packed = row, row
        """A row of the table, and the same at the upper edge of the band (`_ahead`)."""
        self.pool = PoolObserved(ready=0)
        self.capacity = policy.capacity
        """K as last reported, without the limit of decode workers."""
        self.decode_workers = DecodeWorkers()
        self.floor = policy.capacity
        """K_floor as last reported."""
        self.price = QualityPrice(policy.quality_debt_limit)
        self.feedback_monitor = FeedbackMonitor(policy.stale_s)
        self.forecast = Forecast(policy.horizon_s, policy.quantile)
        self._latency = latency
        self._scale_in_backoff = ScaleInBackoff(policy.horizon_s)
        self._shortage = ShortageMemory(policy.horizon_s)
        self._short_size: int | None = None
        """The size for which the last advice found too few workers by quality or lateness, if it did."""
        self._needed = Peak(FARTHEST * policy.in_window_s)
        self.peak_window_s = policy.peak_window_s
        self._required = Peak(max(policy.peak_window_s, longest_peak_window_s))
        self._changed_at: float | None = None
        self._busy_at: float | None = None

    def update(self, feedback: LoadFeedback, now: float) -> bool:
        """Apply one feedback message at monotonic time `now`; returns whether it was accepted."""
        if not self.feedback_monitor.update(feedback, now):
            return False
        self.accepted(feedback, now)
        return True

    def accepted(self, feedback: LoadFeedback, now: float) -> None:
        """Apply one feedback message that `feedback_monitor` has accepted."""
        if feedback.workers > 0:
            self.capacity = max(denoised(feedback) // feedback.workers, 1)
            self.floor = floor_of(feedback, self.capacity)
        self.decode_workers.update(feedback)
        self.price.observe(feedback.quality_debt, now)
        if feedback.required > 0 or self._busy_at is None:
            self._busy_at = now
        self.forecast.observe(feedback.required, now)

    def use(self, headroom: Headroom) -> None:
        """Replace the parameters in force."""
        self.row, self._headroom = headroom.row, headroom
        self.peak_window_s = headroom.peak_window_s
        self.forecast.quantile = headroom.quantile

    def done(self, action: ScalingAction, changes: bool, now: float) -> None:
        """Note a decision. `changes`: it changed the target."""
        if changes:
            self._changed_at = now
        feedback = self.feedback_monitor.feedback
        if action is ScalingAction.OUT:
            self._scale_in_backoff.grew(now)
            if self._short_size is not None and feedback is not None:
                self._shortage.grew(feedback, self._short_size, now)
        elif action is ScalingAction.IN:
            self._scale_in_backoff.shrank(now)
            self._shortage.shrank(now)

    @property
    def predictive(self) -> bool:
        """Whether the forecast counts: the policy decides, or else the table for this level."""
        ordered = self.policy.predictive
        return self.row.predictive if ordered is None else ordered

    @property
    def in_force(self) -> LevelParameters:
        """The parameters in force: those of the table, with absorption counted."""
        feedback = self.feedback_monitor.feedback
        if feedback is None or self.policy.quality_debt_limit <= 0:
            return self.row
        return priced(self.row, self.capacity, self.floor, self._price(feedback))

    def advise(self, size: int, wakes: bool, now: float) -> Advice:
        """Advise a pool of `size`, without regard to orders. `wakes`: an empty pool has got a session."""
        policy = self.policy
        if size == 0 and (wakes or self._is_wanted(now)):
            first = min(max(self._budget(), 1), policy.most)
            return Advice(ScalingAction.WAKE, first, "wake", lambda: "a session needs a worker")
        if size > policy.most:
            return limited(policy.most, "maximum")
        if size < policy.least and not policy.scale_to_zero:
            return limited(policy.least, "minimum")
        feedback = self.feedback_monitor.feedback
        if feedback is None or self.feedback_monitor.is_stale(now):
            return hold(size, "stale", lambda: f"{self.feedback_monitor.silence(now)}; not scaling in")
        needed, ahead = self._needs()
        why = partial(self._calculation, feedback, needed, ahead)
        self._needed.add(needed, now)
        self._required.add(feedback.required, now)
        self._short_size = size if self._is_short(feedback, now) else None
        if needed <= size and self._short_size is not None:
            needed, why = size + 1, partial(reasons.one_more, feedback)
        if needed > size:
            return self._out(size, feedback, needed, why, now)
        shrinks = needed < size or feedback.required == 0
        found = self._in(size, feedback, now) if shrinks else hold(size, "steady", why)
        if found.action is reasons.HOLD and (short := self._undecoded(feedback)):
            return hold(size, "decode", lambda: f"{short}; no worker is added")
        return found

    def _is_wanted(self, now: float) -> bool:
        feedback = self.feedback_monitor.feedback
        return feedback is not None and feedback.required > 0 and not self.feedback_monitor.is_stale(now)

    def _needs(self) -> tuple[int, bool]:
        """Return the workers that are needed, without limits, and whether the forecast needs them."""
        now_needed = self._budget()
        ahead = self._ahead() if self.predictive else 0
        return (ahead, True) if ahead > now_needed else (now_needed, False)

    def _calculation(self, feedback: LoadFeedback, needed: int, ahead: bool) -> str:
        """Explain what `_needs` has returned."""
        if ahead:
            return f"{self.forecast.value:.1f} sessions are expected in {self.policy.horizon_s:g} s"
        required = math.ceil(decoded(feedback.required, feedback))
        target = self.in_force.target_utilization
        return reasons.needed_by(required, self.capacity, target, needed, self._basis)

    @property
    def _basis(self) -> str:
        headroom = self._headroom
        return f"at level {self.row.level}" if headroom is None else headroom.basis

    def _is_short(self, feedback: LoadFeedback, now: float) -> bool:
        """Whether quality or lateness shows too few workers although counts do not.

        Quality debt must exceed its limit for longer than one absorbed burst shows in it. Beyond one worker
        for each session, more workers help no chunk.
        """
        if self.policy.quality_debt_limit <= 0 or feedback.required <= feedback.workers:
            return False
        if self.pool.starting > 0 or self._rests(self._shortage.wait_s, now) or self._undecoded(feedback):
            return False
        burst_s = DEBT_WINDOW_S + self.policy.horizon_s
        return feedback.deficit >= LATE_CHUNKS or self.price.exceeded_s(now) > burst_s

    def _undecoded(self, feedback: LoadFeedback) -> str:
        return self.decode_workers.shortage(feedback, self.row.target_utilization)

    def _budget(self) -> int:
        feedback = self.feedback_monitor.feedback
        required = decoded(0 if feedback is None else feedback.required, feedback)
        return budget(required, self.capacity, self.in_force, self._latency, self.policy.most)

    def _ahead(self) -> int:
        """Return the workers that hold the forecast at the upper edge of the band.

        The forecast's margin is the headroom, so no more is added. A worker that absorbs counts with K_floor.
        """
        value = decoded(self.forecast.value or 0.0, self.feedback_monitor.feedback)
        capacity = self.floor if self.policy.quality_debt_limit > 0 else self.capacity
        row, packed = self._packed
        if row is not self.row or row is packed:
            edge = min(self.row.target_utilization + self.policy.hysteresis, 1.0)
            packed = self.row.model_copy(update={"target_utilization": edge, "latency_weight": 0.0})
            self._packed = self.row, packed
        return budget(value, capacity, packed)

    # Out and in

    def _out(self, size: int, feedback: LoadFeedback, needed: int, why: Explain, now: float) -> Advice:
        row, policy = self.in_force, self.policy
        trigger = overload(feedback, row.target_utilization, policy.hysteresis)
        if not trigger and self._short_size is not None:
            trigger = "chunks are late or below the quality that is paid for"
        elif not trigger and self.predictive and self._ahead() > size:
            trigger = "the forecast is above the capacity"
        if not trigger:
            return hold(size, "steady", reasons.in_band)
        if size >= policy.most:
            return hold(size, "limit", lambda: f"{trigger}; {why()}, but the maximum size is {policy.most}")
        if self._rests(policy.out_cooldown_s, now):
            return hold(size, "cooling", lambda: f"{trigger}; cool-down after the last change")
        return Advice(ScalingAction.OUT, min(needed, policy.most), "out", lambda: f"{trigger}; {why()}")

    def _in(self, size: int, feedback: LoadFeedback, now: float) -> Advice:
        row, policy = self.in_force, self.policy
        required = feedback.required
        edge = row.target_utilization - policy.hysteresis
        debt = owed(feedback) if policy.quality_debt_limit > 0 else ""
        if debt:
            return hold(size, "owed", lambda: f"{debt}; not scaling in")
        mean = required / denoised(feedback) if feedback.capacity else 0.0
        floor = self._floor(now)
        # A pool that may shrink to zero keeps no slots for an earlier peak.
        peak = self._required.over(self.peak_window_s, now)
        recent = math.ceil(peak / self._peak_slots(feedback)) if floor else 0
        window_s = self._scale_in_backoff.factor * policy.in_window_s
        kept = self._shortage.kept(self._required.over(window_s, now), now)
        lowest = max(self._needed.over(window_s, now), recent, floor)
        if kept >= size > lowest:
            return hold(size, "short", lambda: f"{self._shortage}; not scaling in")
        lowest = max(lowest, kept)
        if lowest >= size or decode_too(feedback) or (mean >= edge - EPSILON and required > 0):
            return hold(size, "steady", reasons.in_band)
        since = self.feedback_monitor.since
        if since is None or now - since < window_s:
            return hold(size, "settling", lambda: f"load reports do not cover the last {window_s:g} s yet")
        if self._rests(policy.in_cooldown_s, now):
            return hold(size, "cooling", lambda: "cool-down after the last change")
        # The formula's own size must count as inside the band, even if a small K makes its load coarse.
        upper = max(row.target_utilization + policy.hysteresis, self._even_load(feedback))
        for rest in range(lowest, size):
            if would_hold(required, self.capacity, min(feedback.workers, rest), upper):
                most = f" and the peak of {peak} in the last {self.peak_window_s:g} s"
                held = reasons.holds(rest, required, self._basis, most if rest == recent else "")
                why = partial(reasons.too_large, mean, row.target_utilization, policy.hysteresis, held)
                return Advice(ScalingAction.IN, rest, "in", why)
        return hold(size, "packed", partial(reasons.packed, required))

    def _peak_slots(self, feedback: LoadFeedback) -> float:
        if self.policy.quality_debt_limit <= 0:
            return self.capacity
        return peak_slots(self.capacity, self.floor, self._price(feedback))

    def _price(self, feedback: LoadFeedback) -> float:
        return 1.0 if feedback.deficit >= LATE_CHUNKS else self.price.value

    def _even_load(self, feedback: LoadFeedback) -> float:
        """Return the load of the fullest of the budgeted workers, ⌈N_req / (K ρ̂)⌉ or more, evenly filled."""
        return fullest(feedback.required, max(self._budget(), 1)) / self.capacity

    def _floor(self, now: float) -> int:
        policy = self.policy
        idle = self._busy_at is not None and now - self._busy_at >= policy.zero_after_s
        if policy.scale_to_zero and idle and self.pool.suspended == 0:
            return 0
        return min(max(policy.least, 1), policy.most)

    def _rests(self, cooldown_s: float, now: float) -> bool:
        return self._changed_at is not None and now - self._changed_at < cooldown_s

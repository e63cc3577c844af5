"""Learns how much headroom pays, from the demand that this deployment has seen.

Every candidate of headroom sizes a virtual pool (`virtual_pool`) under the real demand, with the controller's
own rules. The learner sums what each would have cost, and adds the operator's price of each late session. It
follows the candidate with the least sum (follow the leader): all candidates see the whole demand, so nothing
has to be tried on real sessions.

- Older sums fade (`MEMORY_S`), so that the choice follows a change of the workload within hours.
- Until enough has been seen, the first candidate is in force. It depends on the time that a worker takes to
  start: a few seconds ahead a forecast is good, and for longer ahead a share of free slots costs less.
- The choice changes only for a gain above the price of `MARGIN_LATE` sessions and a share of the cost. So one
  unlucky session decides nothing, and equal candidates do not alternate.

The candidates, the first of them and the margins were chosen by replays (`docs/performance.md`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from turboserve.autoscaler.control.budget import LatencyOf, compute_bound
from turboserve.autoscaler.control.headroom import Headroom
from turboserve.autoscaler.control.learned_state import CandidateSums, LearnedState, conditions_of
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.autoscaler.control.virtual_pool import VirtualController
from turboserve.contracts.autoscale import LevelParameters
from turboserve.wording import counted

STEP_S = 0.2
"""Least time between two steps of the virtual pools. The highest demand in between counts."""
CHECK_S = 10.0
"""Time between two choices."""
MEMORY_S = 7200.0
"""Time constant with which sums fade."""
LEARNS_AFTER_S = 300.0
"""Time of which the first candidate is in force."""
MARGIN = 0.01
"""Gain that a change needs, as a share of the cost of the candidate in force."""
MARGIN_LATE = 4.0
"""Gain that a change needs besides, in prices of a late session."""
LONGEST_STEP_S = 60.0
"""A longer silence is not learned from."""

QUANTILES = (0.995, 0.98, 0.9)
"""Coverage of the forecast's margin at a target utilization of 1: the margin is then the only headroom."""
RHOS = (0.85, 1.0, 0.7, 0.6)
"""Target utilizations without the forecast."""
SHORT = 0.25
"""The short window of the peak, relative to the policy's."""
FORECASTS_UP_TO_S = 5.0
"""Longest start-up with which a forecast is the first candidate."""


@dataclass
class FadingSums:
    """What a candidate would have cost, and how many sessions it would have delayed; both fade."""

    cost_s: float = 0.0
    late: float = 0.0
    paid_s: float = 0.0
    """Cost of the virtual pool when it was read last."""
    counted: int = 0
    """Late sessions of the virtual pool when it was read last."""

    def total_s(self, price_s: float) -> float:
        return self.cost_s + price_s * self.late


def candidates(policy: ControlPolicy) -> tuple[Headroom, ...]:
    """Return the candidates; the first is in force until enough has been seen."""
    window_s = policy.peak_window_s
    ahead = [
        Headroom(_row(1.0, True), each_s, quantile, True)
        for each_s in (SHORT * window_s, window_s)
        for quantile in QUANTILES
    ]
    present = [Headroom(_row(rho, False), window_s, policy.quantile, True) for rho in RHOS]
    rows = [*ahead, *present] if policy.horizon_s <= FORECASTS_UP_TO_S else [*present, *ahead]
    ordered = policy.predictive
    kept = [row for row in rows if ordered is None or row.row.predictive == ordered]
    return tuple(dict.fromkeys(kept))


def _row(rho: float, predictive: bool) -> LevelParameters:
    return LevelParameters(
        level=1, volatility_from=0.0, latency_weight=0.2, target_utilization=rho, predictive=predictive
    )


class HeadroomLearner:
    """Chooses among the candidates of headroom. A pure core: demand and time in, a choice out."""

    def __init__(
        self,
        policy: ControlPolicy,
        size: int,
        latency: LatencyOf = compute_bound,
        given: Sequence[Headroom] = (),
    ) -> None:
        self._policy = policy
        self.candidates = tuple(given) or candidates(policy)
        self.sums = [FadingSums() for _ in self.candidates]
        self.chosen = 0
        """Index of the candidate in force."""
        self._before = 0
        self.seen_s = 0.0
        """Time that was learned from, seconds."""
        self._controllers: list[VirtualController] = []
        self._size, self._latency = size, latency
        self._stepped_at = self._checked_at = -math.inf
        self._highest = 0

    @property
    def headroom(self) -> Headroom:
        """The parameters in force."""
        return self.candidates[self.chosen]

    @property
    def longest_peak_window_s(self) -> float:
        return max(each.peak_window_s for each in self.candidates)

    @property
    def reason(self) -> str:
        """Explain the last choice."""
        new, old = self.sums[self.chosen], self.sums[self._before]
        return (
            f"learned from {self.seen_s / 60:.0f} min of this pool's demand: {self.headroom} would have cost "
            f"{new.cost_s:.0f} worker-seconds with {counted(round(new.late), 'late session')}; before, "
            f"{old.cost_s:.0f} with {old.late:.0f}; a late session is priced at "
            f"{self._policy.lateness_price_s:g} worker-seconds"
        )

    def numbers(self) -> dict[str, float]:
        """Return the measurements behind the choice."""
        own = self.sums[self.chosen]
        return {
            "learned_from_s": round(self.seen_s, 1),
            "learned_cost_worker_s": round(own.cost_s, 1),
            "learned_late_sessions": round(own.late, 1),
            "lateness_price_s": self._policy.lateness_price_s,
            "peak_window_s": self.headroom.peak_window_s,
        }

    @property
    def conditions(self) -> str:
        """Digest of the settings under which the sums count."""
        return conditions_of(self._policy, self.candidates)

    def state(self, start_ups_s: Sequence[float], wall: float) -> LearnedState | None:
        """Return what a restart has to keep, as of `wall` (Unix seconds); None if nothing has been seen."""
        if self.seen_s <= 0:
            return None
        return LearnedState(
            conditions=self.conditions,
            at=max(wall, 0.0),
            seen_s=self.seen_s,
            chosen=self.chosen,
            sums=tuple(CandidateSums(cost_s=each.cost_s, late=each.late) for each in self.sums),
            start_ups_s=tuple(start_ups_s),
        )

    def restore(self, state: LearnedState, wall: float) -> None:
        """Continue from a state of `parse` at `wall` (Unix seconds). The sums fade for the time between."""
        fades = math.exp(-max(wall - state.at, 0.0) / MEMORY_S)
        self.sums = [FadingSums(each.cost_s * fades, each.late * fades) for each in state.sums]
        self.seen_s, self.chosen = state.seen_s, state.chosen
        self._before = self.chosen

    def observe(self, required: int, capacity: int, start_up_s: float, now: float) -> bool:
        """Note the demand at monotonic time `now`. Returns whether another candidate is in force from now on.

        `capacity`: K. `start_up_s`: the time that a worker takes to start, as measured.
        """
        self._highest = max(self._highest, required)
        elapsed_s = now - self._stepped_at
        if elapsed_s < STEP_S:
            return False
        if not 0 <= elapsed_s <= LONGEST_STEP_S:
            self._begin(now)
            elapsed_s = 0.0
        for controller in self._controllers:
            controller.pool.start_up_s = start_up_s
            controller.step(self._highest, capacity, now)
        self.seen_s += elapsed_s
        self._stepped_at, self._highest = now, required
        if now - self._checked_at < CHECK_S:
            return False
        self._read(now)
        return self._choose()

    def _begin(self, now: float) -> None:
        """Begin new virtual pools: there was no demand before, or nothing was heard for long."""
        self._controllers = [
            VirtualController(self._policy, headroom, self._size, now, self._latency)
            for headroom in self.candidates
        ]
        for sums in self.sums:
            sums.paid_s, sums.counted = 0.0, 0
        self._checked_at = now

    def _read(self, now: float) -> None:
        fades = math.exp(-(now - self._checked_at) / MEMORY_S)
        for sums, controller in zip(self.sums, self._controllers, strict=True):
            pool = controller.pool
            sums.cost_s = sums.cost_s * fades + pool.cost_s - sums.paid_s
            sums.late = sums.late * fades + pool.late - sums.counted
            sums.paid_s, sums.counted = pool.cost_s, pool.late
        self._checked_at = now

    def _choose(self) -> bool:
        if self.seen_s < LEARNS_AFTER_S:
            return False
        price_s = self._policy.lateness_price_s
        totals = [sums.total_s(price_s) for sums in self.sums]
        best = min(range(len(totals)), key=totals.__getitem__)
        own = self.sums[self.chosen]
        if totals[self.chosen] - totals[best] <= MARGIN * own.cost_s + MARGIN_LATE * price_s:
            return False
        self._before, self.chosen = self.chosen, best
        return True

"""Measures and forecasts the workload: recent session changes, their volatility, future demand."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, deque

from turboserve.autoscaler.control.events import SessionChange

ACTIVE = frozenset({SessionChange.ARRIVAL, SessionChange.ACTIVATION})
"""Changes that make a session newly active."""


class WorkloadDetector:
    """Counts of arrivals, departures, activations and idlings over a sliding window of epochs.

    **Volatility.** Appendix A defines volatility over "a sliding event window of size W", from n_e, "the
    number of newly activated sessions at event e". Formula (6) itself is missing in our copy. We read it as

        v = sqrt( (1/W) Σ (n_e − n̄)² ),   the standard deviation of n_e over the last W events,

    because in Table 5 volatility grows almost in proportion to the burst (0.86 at 7 arrivals, 6.38 at 43). A
    coefficient of variation would not.

    **Events.** An *event* here is an epoch of `epoch_s` seconds with all changes in it. A live system
    receives changes one by one, and single changes would each count 0 or 1, however dense the burst. The
    running epoch counts only if it raises the volatility, so that a burst is seen as it begins.
    """

    def __init__(self, epoch_s: float = 1.0, window: int = 30) -> None:
        self.epoch_s, self.window = epoch_s, window
        self._epochs: deque[Counter[SessionChange]] = deque()
        self._counts: deque[int] = deque()
        self._sum = self._squares = 0
        self._running: Counter[SessionChange] = Counter()
        self._epoch: int | None = None

    def add(self, kind: SessionChange, sessions: int, now: float) -> None:
        """Count a change of `sessions` sessions at monotonic time `now` (seconds)."""
        self.advance(now)
        self._running[kind] += sessions

    def advance(self, now: float) -> None:
        """Close the epochs that are over."""
        epoch = math.floor(now / self.epoch_s)
        if epoch == self._epoch:
            return
        if self._epoch is None:
            self._epoch = epoch
        # Longer silence has the same effect as one window of silence.
        for _ in range(min(epoch - self._epoch, self.window + 1)):
            self._close()
        self._epoch = max(epoch, self._epoch)

    @property
    def volatility(self) -> float:
        """Volatility in sessions per epoch. Epochs before the first change count as empty."""
        settled = self._deviation(self._sum, self._squares)
        running = _activations(self._running)
        if not running:
            return settled
        # The running epoch replaces the oldest one.
        oldest = self._counts[0] if len(self._counts) == self.window else 0
        first = self._deviation(self._sum + running - oldest, self._squares + running**2 - oldest**2)
        return max(settled, first)

    @property
    def activity(self) -> dict[str, int]:
        """Number of changes of each kind in the window, the running epoch included."""
        total = sum(self._epochs, Counter[SessionChange]()) + self._running
        return {kind.value: total[kind] for kind in SessionChange}

    def _close(self) -> None:
        count = _activations(self._running)
        self._epochs.append(self._running)
        self._counts.append(count)
        self._sum += count
        self._squares += count**2
        self._running = Counter()
        if len(self._counts) > self.window:
            self._epochs.popleft()
            gone = self._counts.popleft()
            self._sum -= gone
            self._squares -= gone**2

    def _deviation(self, total: int, squares: int) -> float:
        # The sums are integers, so no rounding error accumulates.
        return math.sqrt(max(self.window * squares - total**2, 0)) / self.window


def _activations(counts: Counter[SessionChange]) -> int:
    return sum(counts[kind] for kind in ACTIVE)


STEP_S = 1.0
"""Length of a step in seconds. The highest demand within a step counts."""
TREND_GAIN = 0.5
DAMPING = 0.5
"""φ: factor on the trend per step, since no ramp lasts forever."""
ERRORS_KEPT = 300
ERRORS_NEEDED = 10
"""With fewer known errors than this, the margin is the largest of them."""


class Forecast:
    """Adds the present demand, an exponentially smoothed and damped trend, and a quantile of past errors.

    N(t + h) ≈ N + trend (φ + … + φ^h) + margin, in sessions.

    - The margin is the `quantile` of the amounts by which earlier forecasts, made h steps before, fell short.
      It is never below zero.
    - The demand itself is not smoothed, since on the profiled traces smoothing only delayed the forecast.
    - A learned forecast, ridge regression on lagged differences, saves nothing at the same coverage
      (`docs/performance.md`).
    - OServe (5.1) forecasts rates per class of request with an LSTM and minutes of history. One pool of one
      model has one class and a horizon of seconds.
    """

    def __init__(self, horizon_s: float, quantile: float) -> None:
        self._steps = max(math.ceil(horizon_s / STEP_S), 1)
        self._reach = sum(DAMPING**step for step in range(1, self._steps + 1))
        self.quantile = quantile
        self._demand: float | None = None
        self._expected = 0.0
        self._trend = 0.0
        self._step: int | None = None
        self._highest = 0.0
        self._made: deque[float] = deque()
        self._errors: deque[float] = deque()
        self._sorted: list[float] = []

    def observe(self, required: float, now: float) -> None:
        """Note the demand, in sessions, at monotonic time `now`."""
        step = math.floor(now / STEP_S)
        if self._step is None:
            self._step = step
        elif step > self._step:
            self._close(self._highest)
            # During silence, assume that the demand does not change.
            for _ in range(min(step - self._step - 1, self._steps)):
                self._close(self._highest)
            self._step, self._highest = step, 0.0
        self._highest = max(self._highest, required)

    @property
    def value(self) -> float | None:
        """Sessions expected `horizon_s` ahead, with the margin; None before the first step is over."""
        plain = self.plain
        return None if plain is None else plain + self._margin()

    @property
    def plain(self) -> float | None:
        """`value` without the margin."""
        if self._demand is None:
            return None
        # The running step counts only if it raises the forecast.
        return max(self._expected, self.ahead(self._highest), 0.0)

    def ahead(self, demand: float) -> float:
        """Return the forecast in sessions, if the next step has this demand.

        Another kind of forecast overrides this method and `learn`.
        """
        return demand + self._reach * self._trend_with(demand)

    def learn(self, demand: float) -> None:
        """Update the trend by a finished step of this demand."""
        self._trend = self._trend_with(demand)

    def _trend_with(self, demand: float) -> float:
        """Return the trend after one more step of this demand."""
        risen = 0.0 if self._demand is None else demand - self._demand
        return DAMPING * self._trend + TREND_GAIN * (risen - DAMPING * self._trend)

    def _close(self, demand: float) -> None:
        self._expected = self.ahead(demand)
        self.learn(demand)
        self._demand = demand
        if len(self._made) == self._steps:
            self._remember(demand - self._made.popleft())
        self._made.append(max(self._expected, 0.0))

    def _remember(self, error: float) -> None:
        self._errors.append(error)
        insort(self._sorted, error)
        if len(self._errors) > ERRORS_KEPT:
            del self._sorted[bisect_left(self._sorted, self._errors.popleft())]

    def _margin(self) -> float:
        if not self._sorted:
            return 0.0
        count = len(self._sorted)
        place = count - 1 if count < ERRORS_NEEDED else math.ceil(self.quantile * count) - 1
        return max(self._sorted[place], 0.0)

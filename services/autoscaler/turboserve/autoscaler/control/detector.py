"""The workload detector: recent session changes and their volatility (TurboServe, 4 and Appendix A)."""

from __future__ import annotations

import math
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

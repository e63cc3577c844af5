"""The workload detector: what sessions did lately, and how unevenly (TurboServe, 4 and Appendix A)."""

from __future__ import annotations

import math
from collections import Counter, deque

from turboserve.autoscaler.control.events import SessionChange

ACTIVE = frozenset({SessionChange.ARRIVAL, SessionChange.ACTIVATION})
"""What makes a session newly active."""


class WorkloadDetector:
    """Counts of arrivals, departures, activations and idlings over a sliding window of epochs.

    Volatility. Appendix A defines it over "a sliding event window of size W", from n_e, "the number of newly
    activated sessions at event e"; the formula itself (6) is lost in our copy. We read it as

        v = sqrt( (1/W) Σ (n_e − n̄)² ),   the standard deviation of n_e over the last W events,

    because in Table 5 it grows almost in proportion to the burst (0.86 at 7 arrivals, 6.38 at 43), which a
    coefficient of variation would not. An *event* here is a scheduling epoch of `epoch_s` seconds, with all
    that happened in it: a live system hears of sessions one by one, and single happenings would each count 0
    or 1, however dense the burst. The running epoch is not counted until it is over, except when it alone
    would raise the volatility, so that a burst is seen as it begins.
    """

    def __init__(self, epoch_s: float = 1.0, window: int = 30) -> None:
        self.epoch_s, self.window = epoch_s, window
        self._epochs: deque[Counter[SessionChange]] = deque()
        self._counts: deque[int] = deque()
        self._sum = self._squares = 0
        self._running: Counter[SessionChange] = Counter()
        self._epoch: int | None = None

    def add(self, kind: SessionChange, sessions: int, now: float) -> None:
        """Take in something that happened at monotonic time `now`."""
        self.advance(now)
        self._running[kind] += sessions

    def advance(self, now: float) -> None:
        """Close the epochs that are over."""
        epoch = math.floor(now / self.epoch_s)
        if self._epoch is None:
            self._epoch = epoch
        # More than a window of silence is a window of silence.
        for _ in range(min(epoch - self._epoch, self.window + 1)):
            self._close()
        self._epoch = max(epoch, self._epoch)

    @property
    def volatility(self) -> float:
        """Sessions per epoch. Epochs before the first one heard of count as empty."""
        settled = self._deviation(self._sum, self._squares)
        running = _activations(self._running)
        if not running:
            return settled
        # The oldest epoch makes room for the running one.
        oldest = self._counts[0] if len(self._counts) == self.window else 0
        first = self._deviation(self._sum + running - oldest, self._squares + running**2 - oldest**2)
        return max(settled, first)

    @property
    def activity(self) -> dict[str, int]:
        """How often each kind happened in the window, the running epoch included."""
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
        # In whole numbers up to the last step: no error builds up, however long it runs.
        return math.sqrt(max(self.window * squares - total**2, 0)) / self.window


def _activations(counts: Counter[SessionChange]) -> int:
    return sum(counts[kind] for kind in ACTIVE)

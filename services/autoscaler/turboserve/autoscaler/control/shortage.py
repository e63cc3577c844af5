"""Remembers that a number of workers served a demand late, although the counts of sessions call it enough.

The formula ⌈N_req / (K ρ̂)⌉ knows no slow worker, no disturbed device, and no declared K that is too high.
Quality debt and deficit show these. The pool then grows beyond the formula (`advisor`), the debt disappears,
and the formula alone would release the new worker at once. So three rules bound the number of changes:

- A demand that was short on n workers keeps n + 1 workers for `HOLD_S`, as long as the demand is not lower.
  Then it keeps n for as long again, so that the same size is tried first, and not a smaller one.
- A shortage that returns within the hold of the scale-in before doubles the hold, up to `FARTHEST` times.
  Any other shortage halves it.
- A worker that did not lower the shortage doubles the wait for the next one, up to `FARTHEST` times.
"""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.autoscaler.control.absorption import DEBT_WINDOW_S
from turboserve.autoscaler.control.scale_in import FARTHEST
from turboserve.contracts.pool import LoadFeedback
from turboserve.wording import counted

HOLD_S = 2 * DEBT_WINDOW_S
"""Shortest hold. Quality debt counts over the last minute, so a shorter hold would end with the debt."""


@dataclass(frozen=True)
class FoundShort:
    """`required` sessions were short on `size` workers, last at monotonic time `at`."""

    required: int
    size: int
    deficit: float
    quality_debt: float
    at: float


class ShortageMemory:
    """The last shortage, how long it holds a scale-in back, and how long the next extra worker waits."""

    def __init__(self, start_up_s: float) -> None:
        self._start_up_s = start_up_s
        self._hold_factor = self._wait_factor = 1
        self._found: FoundShort | None = None
        self._shrank_at: float | None = None

    @property
    def hold_s(self) -> float:
        """How long a shortage holds a scale-in back, seconds."""
        return HOLD_S * self._hold_factor

    @property
    def wait_s(self) -> float:
        """Time between two workers beyond the formula, seconds: changes of one start-up do not show yet."""
        return self._start_up_s * self._wait_factor

    def grew(self, feedback: LoadFeedback, size: int, now: float) -> None:
        """Note that a pool of `size` workers grows since it is short."""
        last = self._found
        if self._shrank_at is not None:
            returned = now - self._shrank_at < self.hold_s
            self._hold_factor = (
                min(self._hold_factor * 2, FARTHEST) if returned else max(self._hold_factor // 2, 1)
            )
            self._shrank_at = None
        futile = (
            last is not None
            and size > last.size
            and feedback.required <= last.required
            and feedback.deficit >= last.deficit
            and feedback.quality_debt >= last.quality_debt
        )
        self._wait_factor = min(self._wait_factor * 2, FARTHEST) if futile else 1
        self._found = FoundShort(feedback.required, size, feedback.deficit, feedback.quality_debt, now)

    def shrank(self, now: float) -> None:
        """Note that the pool has shrunk."""
        self._shrank_at = now

    def kept(self, required: int, now: float) -> int:
        """Return the least size for `required` sessions that the last shortage leaves; 0 without one."""
        last = self._found
        if last is None or required < last.required:
            return 0
        holds = (now - last.at) / self.hold_s
        return last.size + 1 if holds < 1 else last.size if holds < 2 else 0

    def __str__(self) -> str:
        last = self._found
        if last is None:
            return "no shortage"
        workers = counted(last.size, "worker was", "workers were")
        return f"{workers} short at {counted(last.required, 'session')}"

"""Checks load feedback. Implausible feedback is counted and changes nothing."""

from __future__ import annotations

import math
from collections import Counter

from turboserve.contracts.pool import LoadFeedback

MOST_SESSIONS = 10**9
"""Largest plausible number of sessions or workers."""
CONVINCED = 5
"""After this many messages in a row that are older than the accepted one, but in order among themselves, they
are accepted: the sender's clock was set back."""


class FeedbackMonitor:
    """The newest plausible feedback, and its age."""

    def __init__(self, stale_s: float) -> None:
        self._stale_s = stale_s
        self.feedback: LoadFeedback | None = None
        self.heard_at: float | None = None
        self.since: float | None = None
        """Start of the last run of feedback without a gap above `stale_s`; None before any feedback."""
        self.refused: Counter[str] = Counter()
        self._refused_at = -math.inf
        self._fault = ""
        self._old_at = 0.0
        self._olds = 0

    def update(self, feedback: LoadFeedback, now: float) -> bool:
        """Check one message at monotonic time `now`; returns whether it was accepted."""
        fault = _fault(feedback) or self._from_the_past(feedback)
        if fault is not None:
            self.refuse(fault, now)
            return False
        self.accept(feedback, now)
        return True

    def accept(self, feedback: LoadFeedback, now: float) -> None:
        """Take one message that is known to be plausible and newer than the accepted ones."""
        if self.is_stale(now):
            self.since = now
        self.feedback, self.heard_at = feedback, now
        self._olds = 0

    def refuse(self, fault: str, now: float) -> None:
        """Count one refused message."""
        self.refused[fault] += 1
        self._refused_at, self._fault = now, fault

    def silence(self, now: float) -> str:
        """Describe why there is no fresh feedback."""
        if now - self._refused_at <= self._stale_s:
            return f"load report is implausible ({self._fault.replace('_', ' ')})"
        if self.heard_at is None:
            return "no load report yet"
        return f"no load report for {self._stale_s:g} s"

    def is_stale(self, now: float) -> bool:
        return self.heard_at is None or now - self.heard_at > self._stale_s

    def age_s(self, now: float) -> float | None:
        return None if self.heard_at is None else now - self.heard_at

    def _from_the_past(self, feedback: LoadFeedback) -> str | None:
        known = self.feedback
        if known is None or feedback.at >= known.at:
            return None
        self._olds = self._olds + 1 if feedback.at > self._old_at or self._olds == 0 else 1
        self._old_at = feedback.at
        return None if self._olds >= CONVINCED else "from_the_past"


def _fault(feedback: LoadFeedback) -> str | None:
    if not (math.isfinite(feedback.rho_max) and feedback.rho_max >= 0):
        return "rho_max_not_a_number"
    if not math.isfinite(feedback.at):
        return "time_not_a_number"
    if not (math.isfinite(feedback.quality_debt) and 0 <= feedback.quality_debt <= 1):
        return "quality_debt_not_a_share"
    if not (math.isfinite(feedback.deficit) and feedback.deficit >= 0):
        return "deficit_not_a_number"
    if feedback.floor_capacity is not None and not 0 <= feedback.floor_capacity <= MOST_SESSIONS:
        return "floor_capacity_implausible"
    counts = [feedback.required, feedback.waiting, feedback.capacity, feedback.workers]
    if (decoding := feedback.decoding) is not None:
        counts += [decoding.workers, decoding.sessions, decoding.denoised, decoding.own]
    if min(counts) < 0:
        return "below_zero"
    if max(counts) > MOST_SESSIONS:
        return "too_large"
    if feedback.waiting > feedback.required:
        return "more_wait_than_are_required"
    if feedback.own_required is not None and not 0 <= feedback.own_required <= feedback.required:
        return "own_sessions_implausible"
    if (feedback.workers > 0) != (feedback.capacity > 0):
        return "workers_without_capacity"
    return None

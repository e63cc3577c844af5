"""Decode workers as the limit of a pool: how many are needed, and that workers that denoise do not help.

A worker of the role `denoise` reports no more sessions than its decode workers allot to it. A further worker
divides the same allotments again. So a pool is sized by what its workers denoise, and by no more sessions
than its decode workers carry, with those of its workers that decode themselves.
"""

from __future__ import annotations

import math

from turboserve.autoscaler.control.budget import EPSILON
from turboserve.contracts.decoding import DecodeCapacity, DecodeNeed
from turboserve.contracts.pool import LoadFeedback
from turboserve.wording import counted


def denoised(feedback: LoadFeedback) -> int:
    """Return the sum of K over all ready workers, without the limit of decode workers."""
    decoding = feedback.decoding
    return feedback.capacity if decoding is None else max(decoding.denoised, feedback.capacity)


def are_limit(feedback: LoadFeedback) -> bool:
    """Whether the workers may have fewer sessions than they denoise."""
    return feedback.capacity < denoised(feedback)


def decoded(sessions: float, feedback: LoadFeedback | None) -> float:
    """Return how many of `sessions` decode workers, or the workers themselves, decode at present."""
    if feedback is None or feedback.decoding is None:
        return sessions
    return min(sessions, max(_carried(feedback.decoding), feedback.capacity))


def _carried(known: DecodeCapacity) -> int:
    """Sessions that decode workers, and workers that decode, carry."""
    return known.sessions + known.own


def decode_too(feedback: LoadFeedback) -> bool:
    """Whether the workers decode, too: for sessions that decode workers do not carry."""
    known = feedback.decoding
    return known is not None and are_limit(feedback) and feedback.required > _carried(known)


class DecodeWorkers:
    """The decode workers of a pool."""

    def __init__(self) -> None:
        self._each: float | None = None
        """Sessions that one carries, as last reported."""

    def update(self, feedback: LoadFeedback) -> None:
        """Apply one accepted feedback."""
        known = feedback.decoding
        if known is not None and known.workers > 0 and known.sessions > 0:
            self._each = known.sessions / known.workers

    def need(self, feedback: LoadFeedback | None, target_utilization: float) -> DecodeNeed | None:
        """Return how many decode workers the sessions need. None: the workers have none.

        ⌈(N_req − K' ρ̂) / (g ρ̂)⌉, where one decode worker carries g sessions, and K' is the sum of K of the
        workers that decode themselves.
        """
        known = None if feedback is None else feedback.decoding
        if feedback is None or known is None:
            return None
        needed = None
        if feedback.required == 0:
            needed = 0
        elif self._each is not None:
            apart = feedback.required - known.own * target_utilization
            needed = max(math.ceil(apart / (self._each * target_utilization) - EPSILON), 1)
        return DecodeNeed(
            workers=known.workers, sessions=known.sessions, needed=needed, limits=are_limit(feedback)
        )

    def shortage(self, feedback: LoadFeedback, target_utilization: float) -> str:
        """Describe why only more decode workers help; empty if they are not the limit."""
        known, need = feedback.decoding, self.need(feedback, target_utilization)
        if (
            known is None
            or need is None
            or not need.limits
            or need.needed is None
            or need.needed <= need.workers
        ):
            return ""
        own = f" − {known.own} × {target_utilization:g}" if known.own else ""
        apart = f"({feedback.required}{own})" if own else f"{feedback.required}"
        quotient = f"⌈{apart} / ({self._each:.3g} × {target_utilization:g})⌉ = {need.needed}"
        sessions = counted(feedback.required, "session needs", "sessions need")
        there = "1 is there" if need.workers == 1 else f"{need.workers} are there"
        return f"decode workers are the limit: {sessions} {quotient} of them, and {there}"

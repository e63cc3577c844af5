"""Deciders of the number of workers: the product's controller, and those that it is compared with."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from turboserve.autoscaler.control.controller import Controller
from turboserve.autoscaler.control.events import (
    ControlTick,
    FeedbackReceived,
    PoolObserved,
    SessionChange,
    SessionChanged,
)
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.contracts.autoscale import LevelParameters, ProfileTable, Provenance
from turboserve.contracts.pool import LoadFeedback


class Sizer(Protocol):
    """Receives all events in order of time; `target` is read after each call."""

    @property
    def target(self) -> int: ...

    @property
    def absorbs(self) -> bool: ...

    def on_session_change(self, kind: SessionChange, now: float) -> None: ...

    def on_feedback(self, feedback: LoadFeedback, starting: int, now: float) -> None: ...

    def tick(self, now: float) -> None: ...


class Controlled:
    """The product's controller."""

    def __init__(self, policy: ControlPolicy, table: ProfileTable, target: int) -> None:
        self.controller = Controller(policy, table, target)

    @property
    def target(self) -> int:
        return self.controller.target

    @property
    def absorbs(self) -> bool:
        return self.controller.absorbs

    def on_session_change(self, kind: SessionChange, now: float) -> None:
        self.controller.handle(SessionChanged(kind), now)

    def on_feedback(self, feedback: LoadFeedback, starting: int, now: float) -> None:
        self.controller.handle(PoolObserved(feedback.workers, starting), now)
        self.controller.handle(FeedbackReceived(feedback), now)

    def tick(self, now: float) -> None:
        self.controller.handle(ControlTick(), now)


class Fixed:
    """A pool that never changes."""

    absorbs = False
    """Whether workers hold more than K sessions at lower fidelity."""

    def __init__(self, target: int) -> None:
        self.target = target

    def on_session_change(self, kind: SessionChange, now: float) -> None:
        pass

    def on_feedback(self, feedback: LoadFeedback, starting: int, now: float) -> None:
        pass

    def tick(self, now: float) -> None:
        pass


class Planned(Fixed):
    """Follows a schedule: size i from i × `slot_s` on. Growth is ordered `ahead_s` earlier."""

    def __init__(self, sizes: Sequence[int], slot_s: float, ahead_s: float) -> None:
        self._sizes, self._slot_s, self._ahead_s = sizes, slot_s, ahead_s
        super().__init__(0)
        self.tick(0.0)

    def on_session_change(self, kind: SessionChange, now: float) -> None:
        self.tick(now)

    def tick(self, now: float) -> None:
        self.target = max(self._size(now), self._size(now + self._ahead_s))

    def _size(self, time: float) -> int:
        return self._sizes[min(int(time / self._slot_s), len(self._sizes) - 1)]


class Utilization(Fixed):
    """Kubernetes' HorizontalPodAutoscaler on mean utilization, with its defaults.

    Every 15 s it computes ⌈ready × utilization / target⌉, unless the ratio is within 10 % of 1. It scales up
    at most to the larger of double and 4 more in 15 s, and down to the largest recommendation of the last 300
    s.
    """

    SYNC_S, TOLERANCE, DOWN_WINDOW_S = 15.0, 0.1, 300.0

    def __init__(self, target: int, utilization: float, least: int, most: int) -> None:
        super().__init__(target)
        self._wanted, self._least, self._most = utilization, least, most
        self._feedback: LoadFeedback | None = None
        self._synced_at = 0.0
        self._advised: deque[tuple[float, int]] = deque()

    def on_feedback(self, feedback: LoadFeedback, starting: int, now: float) -> None:
        self._feedback = feedback

    def tick(self, now: float) -> None:
        if self._feedback is None or now - self._synced_at < self.SYNC_S or not self._feedback.capacity:
            return
        self._synced_at = now
        feedback = self._feedback
        # Only running sessions count: utilization does not show waiting sessions.
        ratio = (feedback.required - feedback.waiting) / feedback.capacity / self._wanted
        advice = self.target
        if abs(ratio - 1) > self.TOLERANCE:
            advice = math.ceil(feedback.workers * ratio)
        self._advised.append((now, advice))
        while self._advised[0][0] < now - self.DOWN_WINDOW_S:
            self._advised.popleft()
        if advice < self.target:
            advice = min(max(size for _, size in self._advised), self.target)
        advice = min(advice, max(2 * self.target, self.target + 4))
        self.target = min(max(advice, self._least), self._most)


def flat_table(rho: float, weight: float = 0.2, predictive: bool = False) -> ProfileTable:
    """Return a table of one level: the same parameters at any volatility."""
    row = LevelParameters(
        level=1, volatility_from=0.0, latency_weight=weight, target_utilization=rho, predictive=predictive
    )
    return ProfileTable(levels=(row,), provenance=Provenance(source=f"fixed at {rho:g}"))

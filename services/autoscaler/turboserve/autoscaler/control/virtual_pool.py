"""A pool at the level of counts that an advisor sizes: what other parameters would have cost and delayed.

The demand is the real one, since the number of active sessions does not depend on the pool's size. Workers
take `start_up_s` to start and are paid for from launch to release. Sessions are spread evenly. Who finds no
slot waits, and is late after `patience_s`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from turboserve.autoscaler.control.advisor import Advisor
from turboserve.autoscaler.control.budget import LatencyOf, compute_bound, fullest
from turboserve.autoscaler.control.events import PoolObserved
from turboserve.autoscaler.control.headroom import Headroom
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.contracts.pool import LoadFeedback


class VirtualPool:
    """Ready and starting workers, waiting sessions, and the totals of cost and lateness."""

    def __init__(self, size: int, capacity: int, start_up_s: float, patience_s: float, now: float) -> None:
        self.ready, self.capacity = size, capacity
        self.start_up_s = start_up_s
        self.cost_s = 0.0
        """Worker-seconds from launch to release."""
        self.late = 0
        """Sessions that waited longer than `patience_s` for a slot."""
        self.waiting = 0
        self._patience_s = patience_s
        self._starting: deque[float] = deque()
        """When each starting worker will be ready, rising."""
        self._queue: deque[tuple[float, int]] = deque()
        """(since when, how many sessions wait), the longest wait first."""
        self._required = 0
        self._now = now

    @property
    def target(self) -> int:
        """Workers that are paid for."""
        return self.ready + len(self._starting)

    @property
    def starting(self) -> int:
        return len(self._starting)

    @property
    def next_ready_at(self) -> float | None:
        """When the next starting worker will be ready; None if none starts."""
        return self._starting[0] if self._starting else None

    def advance(self, now: float) -> None:
        """Let time pass: workers become ready and take waiting sessions."""
        while self._starting and self._starting[0] <= now:
            at = max(self._starting[0], self._now)
            self._pay(at)
            self._starting.popleft()
            self.ready += 1
            self._settle(at)
        self._pay(now)

    def demand(self, required: int, now: float) -> None:
        """Set the number of active sessions."""
        self.advance(now)
        self._required = required
        self._settle(now)

    def resize(self, target: int, now: float) -> None:
        """Start workers, or release some: first those that do not serve yet, as the pool's core does."""
        self.advance(now)
        while self.target < target:
            self._starting.append(max(now + self.start_up_s, self._starting[-1] if self._starting else now))
        while self.target > target and self._starting:
            self._starting.pop()
        self.ready = min(self.ready, target)
        self._settle(now)

    def feedback(self, now: float) -> LoadFeedback:
        """Return what a scheduler would report."""
        served = self._required - self.waiting
        fullest_load = fullest(served, self.ready) / self.capacity if self.ready else 0.0
        return LoadFeedback.of_valid_fields(
            {
                "model": "",
                "rho_max": fullest_load,
                "required": self._required,
                "waiting": self.waiting,
                "capacity": self.ready * self.capacity,
                "workers": self.ready,
                "quality_debt": 0.0,
                "deficit": 0.0,
                "floor_capacity": None,
                "decoding": None,
                "decisions": 0,
                "at": now,
            }
        )

    def _pay(self, now: float) -> None:
        if now > self._now:
            self.cost_s += (now - self._now) * (self.ready + len(self._starting))
            self._now = now

    def _settle(self, now: float) -> None:
        """Let sessions wait that find no slot; serve the longest waits first."""
        waiting = max(self._required - self.ready * self.capacity, 0)
        if waiting > self.waiting:
            self._queue.append((now, waiting - self.waiting))
        served = self.waiting - waiting
        while served > 0:
            since, count = self._queue.popleft()
            taken = min(count, served)
            if now - since > self._patience_s:
                self.late += taken
            if taken < count:
                self._queue.appendleft((since, count - taken))
            served -= taken
        self.waiting = waiting


class VirtualController:
    """Sizes a virtual pool as the controller would, with fixed parameters."""

    def __init__(
        self,
        policy: ControlPolicy,
        headroom: Headroom,
        size: int,
        now: float,
        latency: LatencyOf = compute_bound,
    ) -> None:
        policy = replace(
            policy, predictive=None, quality_debt_limit=0.0, scale_to_zero=False, least=max(policy.least, 1),
            most=max(policy.most, 1),
        )  # fmt: skip
        self.advisor = Advisor(policy, headroom.row, latency, headroom.peak_window_s)
        self.advisor.use(headroom)
        size = min(max(size, policy.least), policy.most)
        self.pool = VirtualPool(size, policy.capacity, policy.horizon_s, policy.late_after_s, now)

    def step(self, required: int, capacity: int, now: float) -> None:
        """Apply the demand at `now`, and act as the controller would."""
        pool, advisor = self.pool, self.advisor
        pool.capacity = capacity
        pool.demand(required, now)
        advisor.pool = PoolObserved(pool.ready, pool.starting)
        feedback = pool.feedback(now)
        advisor.feedback_monitor.accept(feedback, now)
        advisor.accepted(feedback, now)
        advice = advisor.advise(pool.target, False, now)
        if advice.size != pool.target:
            advisor.done(advice.action, True, now)
            pool.resize(advice.size, now)

"""Totals of one run on the virtual clock."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ScalingOutcome:
    """Costs and latencies of one run. Times in seconds, cost in worker-seconds from launch to release."""

    cost_s: float = 0.0
    session_s: float = 0.0
    """Session-seconds executed; latencies are averaged over them."""
    latency_sum: float = 0.0
    worst_s: float = 0.0
    """Worst latency of a chunk, including the wait for a slot and migrations."""
    worst_served_s: float = 0.0
    """Worst latency of a chunk of a session that stays on its worker: the figure that the paper reports."""
    placed: int = 0
    waited: int = 0
    """Sessions that found no slot when they became active."""
    wait_s: float = 0.0
    """Session-seconds without a slot while active."""
    late: int = 0
    """Late chunks: first chunks of activations, wait included, and next chunks after migrations."""
    late_first: int = 0
    """Late first chunks of activations alone."""
    lowered_s: float = 0.0
    """Session-seconds whose chunks are below their best configuration."""
    debt_peak: float = 0.0
    """Largest share of the last minute's chunks below their best configuration."""
    late_since: list[float] = field(default_factory=list)
    """Time at which each of the late sessions became active or had migrated."""
    migrated_at: list[float] = field(default_factory=list)
    """Time at which each migration ended."""
    actions: list[tuple[float, int, int]] = field(default_factory=list)
    """(time, workers before, workers after) for every change of the target."""
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """(time, workers paid for) at every change."""

    @property
    def migrations(self) -> int:
        """Number of migrations."""
        return len(self.migrated_at)

    @property
    def mean_s(self) -> float:
        """Mean chunk latency, weighted by session-seconds."""
        return self.latency_sum / self.session_s if self.session_s else 0.0

    @property
    def quality_debt(self) -> float:
        """Share of all chunks below their best configuration."""
        return self.lowered_s / self.session_s if self.session_s else 0.0

    @property
    def passes(self) -> bool:
        """Whether no chunk was later than the target."""
        return self.late == 0

    def cost_between(self, begins_s: float, ends_s: float) -> float:
        """Return the worker-seconds paid for in a part of the run."""
        bounds = [*(at for at, _ in self.sizes), math.inf]
        return sum(
            size * max(min(until, ends_s) - max(at, begins_s), 0.0)
            for (at, size), until in zip(self.sizes, bounds[1:], strict=True)
        )

    def figures(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "cost_worker_s": round(self.cost_s, 2),
            "mean_latency_ms": round(1000 * self.mean_s, 2),
            "worst_served_ms": round(1000 * self.worst_served_s, 2),
            "worst_chunk_ms": round(1000 * self.worst_s, 2),
            "late_chunks": self.late,
            "activations": self.placed,
            "waited": self.waited,
            "wait_session_s": round(self.wait_s, 2),
            "moves": self.migrations,
            "actions": len(self.actions),
        }


DEBT_S = 60
EPSILON_S = 1e-6


class DebtWindow:
    """Share of the session-seconds of the last minute whose chunks were lowered, in buckets of one second."""

    def __init__(self) -> None:
        self._buckets: deque[list[float]] = deque()
        """[second, session-seconds, lowered session-seconds]."""
        self._sessions_s = self._lowered_s = 0.0

    def add(self, now: float, sessions_s: float, lowered_s: float) -> None:
        """Count the time up to `now` since the last call."""
        second = math.floor(now)
        if not self._buckets or self._buckets[-1][0] != second:
            self._buckets.append([second, 0.0, 0.0])
        self._buckets[-1][1] += sessions_s
        self._buckets[-1][2] += lowered_s
        self._sessions_s += sessions_s
        self._lowered_s += lowered_s

    def share(self, now: float) -> float:
        while self._buckets and self._buckets[0][0] < now - DEBT_S:
            _, sessions_s, lowered_s = self._buckets.popleft()
            self._sessions_s -= sessions_s
            self._lowered_s -= lowered_s
        if self._lowered_s <= EPSILON_S or self._sessions_s <= EPSILON_S:
            # Sums of floats leave a remainder, and zero means that the pool may shrink.
            return 0.0
        return min(self._lowered_s / self._sessions_s, 1.0)

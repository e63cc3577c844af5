"""Totals of one run on the virtual clock."""

from __future__ import annotations

import math
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
    late_since: list[float] = field(default_factory=list)
    """Time at which each of the late sessions became active or had migrated."""
    migrations: int = 0
    actions: list[tuple[float, int, int]] = field(default_factory=list)
    """(time, workers before, workers after) for every change of the target."""
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """(time, workers paid for) at every change."""

    @property
    def mean_s(self) -> float:
        """Mean chunk latency, weighted by session-seconds."""
        return self.latency_sum / self.session_s if self.session_s else 0.0

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

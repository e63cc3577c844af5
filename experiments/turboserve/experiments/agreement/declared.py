"""What is declared for both sides: trace, device, pool, and settings that are not the shipped ones."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from turboserve.bench.paced.device import PacedDevice
from turboserve.bench.paced.model import NAME
from turboserve.experiments.autoscale.production import production
from turboserve.experiments.autoscale.trace import Step, WorkloadTrace, checked

POLICIES = ("min-max", "least-loaded", "round-robin")
"""Placement policies by the setting's names. The first is the shipped one, which also migrates."""
CAPACITY = 6
"""K: sessions of one worker. Eight workers hold M's peak."""
FORWARD_S = {1: 0.06, 6: 0.21}
"""Seconds of a forward by sessions. A chunk of 1.5 s takes 0.3 s alone, and 1.05 s beside five others."""
STATE_BYTES = 1 << 20
REPORT_S = 1.0
"""Time between two reports of a viewer, and of a gateway about it."""
SETTINGS: Mapping[str, float] = {
    "playhead_interval_s": REPORT_S,
    "worker_tick_s": 0.5,
    "tier_report_interval_s": 2.0,
    "tenant_creations_per_minute": 0,
}
"""Settings on both sides. Reports are rarer than as shipped, so that the machine keeps idle time."""
BUSIEST = 0.7
"""Share of the machine's processor time above which a run does not count: the workers' pace is not theirs."""
SETTLE_S = 15.0
"""Time from the readiness of the first workers until the trace begins. The autoscaler's forecast compares the
demand with its forecasts of 10 s ago, so its first decisions depend on how long it has run before."""


@dataclass(frozen=True)
class Size:
    """Size of one run."""

    workers: int = 8
    """Maximum of the pool."""
    minutes: float = 7.5
    """Length of the beginning of trace M that is played."""
    sessions: int = 48
    """Maximum of sessions that are active at once. Sessions of a larger trace are left out at random."""

    @property
    def least(self) -> int:
        """Workers at the beginning, and the minimum of the pool."""
        return max(1, self.workers // 4)

    def trace(self, draw: int) -> WorkloadTrace:
        """Return a draw of M, cut to this size."""
        whole, ends_s = production("M", draw), 60.0 * self.minutes
        names = whole.sessions
        random.Random(f"agreement {draw}").shuffle(names)
        steps: list[Step] = [step for step in whole.steps if step.at < ends_s]
        trace = checked("M", steps, ends_s)
        while trace.peak > self.sessions:
            steps = [step for step in steps if step.session != names[-1]]
            names.pop()
            trace = checked("M", steps, ends_s)
        return trace


@dataclass(frozen=True)
class Constants:
    """Of the real stack, fitted on one run and frozen then."""

    start_s: float = 6.0
    """Time for which a worker loads its model. The real workers wait until their process is as old."""
    forward_extra_s: float = 0.0
    """Time of a forward beyond the declared one."""
    fitted_on: str = "nothing"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Declared:
    """One run, on either side."""

    size: Size
    policy: str
    draw: int
    forward_s: Mapping[int, float] = field(default_factory=lambda: dict(FORWARD_S))

    @property
    def title(self) -> str:
        return f"{self.policy}, draw {self.draw}"

    @property
    def device(self) -> PacedDevice:
        """The real workers' device."""
        return PacedDevice(
            self.forward_s,
            computes=False,
            state_bytes=STATE_BYTES,
            encodes=False,
            start_s=Constants.start_s,
        )

    def environment(self) -> dict[str, str]:
        """Return the variables of the real stack."""
        command = [sys.executable, "-m", "turboserve.bench.paced.worker", self.device.to_json()]
        own = {
            "pool_worker_command": json.dumps(command),
            "worker_max_sessions": str(CAPACITY),
            "model": NAME,
            "default_model": NAME,
            "placement": self.policy,
            "log_level": "WARNING",
            # A slab of this model is a few kilobytes. The default would reserve gigabytes for each worker.
            "memory_bytes": str(64 << 20),
            "host_memory_bytes": str(32 * (STATE_BYTES + (1 << 20))),
        }
        shared = {name: f"{value:g}" for name, value in SETTINGS.items()}
        return {f"TURBOSERVE_{name.upper()}": value for name, value in {**shared, **own}.items()}

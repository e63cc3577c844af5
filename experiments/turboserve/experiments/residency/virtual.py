"""Sessions beyond the slabs of one worker, in virtual time on declared devices."""

from __future__ import annotations

import random
from dataclasses import dataclass

from turboserve.experiments.slack.metrics import StreamMetrics, measure
from turboserve.simulation.runtime.device.pages import state_size
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.simulation.streams import WARM_UP_S, StreamPlan, StreamScale, run_streams

SLABS = 4
CARRIES = 12
"""Number of sessions that the device computes in real time, if each of them has its state in a slab."""
LOAD = 0.9
"""Share of real time that the chunks of so many sessions take."""
STATE_LAYERS = 30
CHUNKS = 80
"""Chunks of one stream: a minute."""
ARRIVE_WITHIN_S = 15.0
START_BUFFER_S = 2.0
"""Time from the request at which a viewer begins to play. A first chunk that comes later is a stall."""
TAIL_S = 30.0
"""Virtual time after which a run ends, beyond the time that all streams take if none waits."""


@dataclass(frozen=True)
class ResidencyRun:
    """Parameters of one run."""

    sessions: int
    """Concurrent streams on one worker."""
    offloads: bool
    """Whether the worker takes the sessions beyond its slabs. Otherwise they wait until a slab is free."""
    copy_s: float
    """Time of a copy of a state between slab and host, seconds."""
    lead_s: float
    """`TURBOSERVE_MAX_LEAD_S` of the worker."""
    seed: int


@dataclass(frozen=True)
class ResidencyOutcome:
    """Result of one run."""

    metrics: StreamMetrics
    returns: int
    """Number of sessions that came back to a slab."""
    late_returns: int
    violations: int

    @property
    def smooth(self) -> bool:
        """Whether no viewer waited beyond the start buffer, and every chunk came."""
        return self.metrics.stalls_per_stream == 0.0 and self.metrics.incomplete == 0


def device(copy_s: float) -> DeviceProfile:
    """Return a device that computes more sessions in real time than its slabs hold.

    A batch has at most as many rows as slabs. So n sessions take n / slabs · L(slabs) for a chunk of each.
    """
    plain = DeviceProfile(decode_s={1: 0.005}, package_s=0.005, text_s={1: 0.005}, recache_s={1: 0.05})
    forwards = plain.denoising + 1
    full_s = LOAD * plain.config.chunk_media_s * SLABS / CARRIES / forwards
    return DeviceProfile(
        forward_s={1: 0.4 * full_s, SLABS: full_s},
        decode_s=plain.decode_s,
        package_s=plain.package_s,
        text_s=plain.text_s,
        recache_s=plain.recache_s,
        host_bytes_per_s=state_size(plain) / copy_s,
        state_layers=STATE_LAYERS,
    )


def simulate(run: ResidencyRun) -> ResidencyOutcome:
    """Play concurrent streams on one worker."""
    more = max(0, run.sessions - SLABS) if run.offloads else 0
    declared = device(run.copy_s)
    scale = StreamScale(
        workers=1,
        most_workers=1,
        slots=SLABS + more,
        host_sessions=more,
        device=declared,
        worker_settings={"max_lead_s": run.lead_s},
    )
    chance = random.Random(f"residency {run.seed}")
    times = sorted(chance.uniform(0.0, ARRIVE_WITHIN_S) for _ in range(run.sessions))
    plans = [StreamPlan(at, CHUNKS) for at in times]
    media_s = declared.config.media_start(CHUNKS)
    longest_s = WARM_UP_S + ARRIVE_WITHIN_S + media_s + TAIL_S
    records, result = run_streams(run.seed, scale, plans, START_BUFFER_S, longest_s)
    counts = result["counts"]
    return ResidencyOutcome(
        measure(records, result["virtual_s"] - WARM_UP_S),
        counts["returns"],
        counts["late_returns"],
        sum(result["violations"].values()),
    )

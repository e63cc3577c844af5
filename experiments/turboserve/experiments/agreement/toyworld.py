"""Toyworld for real on two pinned workers, and the simulator's prediction from the measured profile."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from turboserve.autoscaler.control.events import SessionChange
from turboserve.bench.engine.configured import profile_configured
from turboserve.bench.paced.device import PacedDevice
from turboserve.bench.report import percentile
from turboserve.bench.streaming.viewer import REPORT_INTERVAL_S
from turboserve.experiments.agreement.declared import WARM_UP_S
from turboserve.experiments.agreement.outcome import SeenChunk, error_percent
from turboserve.experiments.agreement.real import played
from turboserve.experiments.agreement.simulated import AgreementScale, simulate_trace
from turboserve.experiments.autoscale.trace import Step, WorkloadTrace
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.worker.settings import Settings as WorkerSettings

WORKERS, SESSIONS = 2, 8
CAPACITY = SESSIONS // WORKERS
STAGE_S, QUICK_STAGE_S = 20.0, 6.0
"""Time with each number of sessions."""
SETTLE_S = 3.0
"""Time after an arrival that does not count: the new session fills its lead."""


def staircase(stage_s: float) -> WorkloadTrace:
    """Return a trace in which one session more arrives at the beginning of each stage."""
    steps = tuple(Step(n * stage_s, f"s{n:05d}", SessionChange.ARRIVAL) for n in range(SESSIONS))
    return WorkloadTrace("1 to 8 sessions", steps, SESSIONS * stage_s)


def measured_stages(batch: int = CAPACITY, repeats: int = 7) -> dict[str, dict[int, float]]:
    """Measure the stages of toyworld on one core, as `turboserve profile engine` does."""
    # A process of its own: a pin to one core holds for the whole process.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measured, batch, repeats).result()


def _measured(batch: int, repeats: int) -> dict[str, dict[int, float]]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found = profile_configured(WorkerSettings(model="toyworld"), None, False, "wan", batch, repeats)
    return {stage: dict(seconds) for stage, seconds in found.stages.items()}


def real(stage_s: float) -> dict[str, Any]:
    """Play the staircase on the real stack. Raises BenchError."""
    command = [sys.executable, "-m", "turboserve.bench.paced.worker", PacedDevice(pinned=True).to_json()]
    environment = {
        "TURBOSERVE_POOL_WORKER_COMMAND": json.dumps(command),
        "TURBOSERVE_WORKER_MAX_SESSIONS": str(CAPACITY),
        # As on the virtual device.
        "TURBOSERVE_OVERLAP": "on",
    }
    found, chunks = played(environment, str(WORKERS), WORKERS, staircase(stage_s), REPORT_INTERVAL_S)
    return {**found, "by_sessions": by_sessions(chunks, stage_s)}


def simulated(profile: str, stage_s: float) -> dict[str, Any]:
    """Predict the same from the measured latencies. `profile`: JSON of `measured_stages`."""
    times = {
        stage: {int(size): seconds for size, seconds in latencies.items()}
        for stage, latencies in json.loads(profile).items()
    }
    device = DeviceProfile(
        forward_s=times["forward"],
        decode_s=times["decode"],
        text_s=times["text"],
        recache_s=times["recache"],
        package_s=times["package"][1],
        slabs=CAPACITY,
        host_states=2 * CAPACITY,
    )
    scale = AgreementScale(
        workers=WORKERS,
        most_workers=WORKERS,
        least_workers=WORKERS,
        slots=CAPACITY,
        report_s=REPORT_INTERVAL_S,
        given={},
        device=device,
        every_forward=True,
    )
    found, chunks = simulate_trace(scale, staircase(stage_s), 0, WARM_UP_S)
    return {**found, "by_sessions": by_sessions(chunks, stage_s)}


def by_sessions(chunks: Sequence[SeenChunk], stage_s: float) -> dict[str, dict[str, Any]]:
    """Return p50 and p95 of the chunks that came while this many sessions were there."""
    found: dict[str, dict[str, Any]] = {}
    for number in range(SESSIONS):
        begins_s = number * stage_s + SETTLE_S
        latencies = [chunk.compute_s for chunk in chunks if begins_s <= chunk.at_s < (number + 1) * stage_s]
        found[str(number + 1)] = {
            "chunks": len(latencies),
            "p50_s": percentile(latencies, 0.5),
            "p95_s": percentile(latencies, 0.95),
        }
    return found


def compared(real_: Mapping[str, Any], simulated_: Mapping[str, Any]) -> dict[str, Any]:
    """Return the errors by number of sessions, and the largest of them."""
    errors: dict[str, dict[str, Any]] = {}
    for sessions, measured in real_["by_sessions"].items():
        predicted = simulated_["by_sessions"][sessions]
        errors[sessions] = {
            f"{name}_error_percent": error_percent(predicted[f"{name}_s"], measured[f"{name}_s"])
            for name in ("p50", "p95")
        }
    return errors

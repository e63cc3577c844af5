"""Toyworld for real on two pinned workers, and the simulator's prediction from the measured profile."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

from turboserve.autoscaler.control.events import SessionChange
from turboserve.bench.engine.configured import profile_configured
from turboserve.bench.paced.device import PacedDevice
from turboserve.bench.report import percentile
from turboserve.bench.streaming.viewer import REPORT_INTERVAL_S
from turboserve.experiments.agreement import prediction
from turboserve.experiments.agreement.outcome import SeenChunk, error_percent
from turboserve.experiments.agreement.prediction import REPEATS
from turboserve.experiments.agreement.real import played
from turboserve.experiments.agreement.simulated import AgreementScale, Disturbances, simulate_trace
from turboserve.experiments.autoscale.trace import Step, WorkloadTrace
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.worker.settings import Settings as WorkerSettings

WORKERS, SESSIONS = 2, 8
CAPACITY = SESSIONS // WORKERS
CHUNK_S = 0.75
"""Video of one chunk."""
GOLDEN = (5**0.5 - 1.0) / 2.0
"""Its multiples are spread evenly, without the whole part."""
STAGE_S, QUICK_STAGE_S = 20.0, 6.0
"""Time with each number of sessions that is predicted."""
FITTED = ("1", "8")
"""Numbers of sessions whose chunks fit the constants. Those between are predicted."""
FIT_STAGES = 3
"""A fitted number's stage is as long as so many others: one session makes only 1.3 chunks a second."""
SETTLE_S = 3.0
"""Time from a stage's beginning that does not count: the new session arrives and fills its lead."""


@dataclass(frozen=True)
class Stage:
    """Time with one number of sessions, in seconds of the trace."""

    sessions: str
    begins_s: float
    ends_s: float


def stages(stage_s: float) -> list[Stage]:
    """Return the stages in order. `stage_s`: length of one that is predicted."""
    found: list[Stage] = []
    for number in map(str, range(1, SESSIONS + 1)):
        begins_s = found[-1].ends_s if found else 0.0
        found.append(Stage(number, begins_s, begins_s + stage_s * (FIT_STAGES if number in FITTED else 1)))
    return found


def staircase(stage_s: float) -> WorkloadTrace:
    """Return a trace in which one session more arrives at the beginning of each stage.

    A session's chunks are due at a fixed pace from its arrival on. So the arrivals are spread over the time
    of one chunk. Otherwise a stage that is a multiple of it lets the same sessions meet in every chunk.
    """
    planned = stages(stage_s)
    begins_s = [
        CHUNK_S * (round(stage.begins_s / CHUNK_S) + n * GOLDEN % 1.0) for n, stage in enumerate(planned)
    ]
    steps = tuple(Step(at_s, f"s{n:05d}", SessionChange.ARRIVAL) for n, at_s in enumerate(begins_s))
    return WorkloadTrace("1 to 8 sessions", steps, planned[-1].ends_s)


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
        # As a worker chooses on one core, and as on the virtual device.
        "TURBOSERVE_OVERLAP": "off",
        # The virtual device has no other configuration.
        "TURBOSERVE_FIDELITY": "best",
    }
    found, chunks = played(environment, str(WORKERS), WORKERS, staircase(stage_s), REPORT_INTERVAL_S)
    return {**found, "by_sessions": by_sessions(chunks, stage_s)}


@dataclass(frozen=True)
class Sharing:
    """What it costs a worker that others use its core: the stack's processes, and the worker's event loop."""

    slowdown: float = 1.0
    """Median time of a chunk, relative to the one by the profile, which is measured alone."""
    p95: float = 1.0
    """95th percentile of a chunk's time, relative to the median."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fitted_on": f"{' and '.join(FITTED)} sessions"}


def device(profile: str, slowdown: float) -> DeviceProfile:
    """Return the device of a worker on one core. `profile`: JSON of `measured_stages`."""
    times = {
        stage: {int(size): slowdown * seconds for size, seconds in latencies.items()}
        for stage, latencies in json.loads(profile).items()
    }
    package_s = times["package"][1]
    return DeviceProfile(
        forward_s=times["forward"],
        # The packager and the next forward share the core in equal parts. So a chunk waits for the packager
        # for twice its time, and the next forward begins later by that time once.
        decode_s={size: seconds + size * package_s for size, seconds in times["decode"].items()},
        text_s=times["text"],
        recache_s=times["recache"],
        package_s=package_s,
        overlaps=False,
        slabs=CAPACITY,
        host_states=2 * CAPACITY,
    )


def fitted(measured: Mapping[str, Any], alone: Mapping[str, Any]) -> Sharing:
    """Fit how much slower, and how much less even, chunks are than by stages that were measured alone.

    Each fitted number of sessions counts alike. `measured`: the real run. `alone`: its simulation without
    sharing.
    """
    slower, spread = [], []
    for number in FITTED:
        real_, simulated_ = measured["by_sessions"][number], alone["by_sessions"][number]
        if not real_["p50_s"] or not simulated_["p50_s"]:
            return Sharing()
        slower.append(real_["p50_s"] / simulated_["p50_s"])
        # Sessions that share forwards also spread the times that were measured alone.
        spread.append(real_["p95_s"] / real_["p50_s"] / (simulated_["p95_s"] / simulated_["p50_s"]))
    slowdown, p95 = (max(1.0, statistics.geometric_mean(ratios)) for ratios in (slower, spread))
    return Sharing(round(slowdown, 4), round(p95, 4))


def simulated(
    profile: str, stage_s: float, slowdown: float = 1.0, p95: float = 1.0, repeat: int = 0
) -> dict[str, Any]:
    """Predict the same from the measured latencies.

    `profile`: see `device`. `slowdown`, `p95`: see `Sharing`.
    """
    worker = device(profile, slowdown)
    # Drawn about once for each chunk.
    disturbances = Disturbances(p95, 1.0 / slowdown, CHUNK_S) if p95 > 1.0 else None
    scale = AgreementScale(
        workers=WORKERS,
        most_workers=WORKERS,
        least_workers=WORKERS,
        slots=CAPACITY,
        report_s=REPORT_INTERVAL_S,
        given={},
        device=worker,
        every_forward=True,
    )
    found, chunks = simulate_trace(scale, staircase(stage_s), repeat, repeat / REPEATS, disturbances)
    return {**found, "by_sessions": by_sessions(chunks, stage_s)}


def predicted(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians of repeated simulations, also by number of sessions."""
    by_number = {
        number: {
            name: statistics.median_low(run["by_sessions"][number][name] for run in runs)
            for name in ("chunks", "p50_s", "p95_s")
        }
        for number in runs[0]["by_sessions"]
    }
    return {**prediction.predicted(runs), "by_sessions": by_number}


def by_sessions(chunks: Sequence[SeenChunk], stage_s: float) -> dict[str, dict[str, Any]]:
    """Return p50 and p95 of the chunks that came while this many sessions were there."""
    found: dict[str, dict[str, Any]] = {}
    for stage in stages(stage_s):
        begins_s = stage.begins_s + SETTLE_S
        latencies = [chunk.compute_s for chunk in chunks if begins_s <= chunk.at_s < stage.ends_s]
        found[stage.sessions] = {
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

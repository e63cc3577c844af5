"""The real stack with workers that are too slow for their sessions, with and without lower fidelity."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import httpx
import psutil
from rich import box
from rich.table import Table

from turboserve.bench.paced.device import PacedDevice
from turboserve.bench.report import BenchError
from turboserve.bench.streaming.decode import decode
from turboserve.bench.streaming.problems import ProblemError
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack, StackStartError
from turboserve.experiments.fidelity.profile import score, wilson_interval
from turboserve.experiments.slack.profiles import FORWARDS, TOYWORLD_FORWARD_S
from turboserve.experiments.toyworld.judge import judge
from turboserve.experiments.toyworld.quality import Job, held_out_jobs
from turboserve.worker.engine.fidelity_profile import FidelityProfile, MeasuredFidelity
from turboserve.worker.engine.snapshot import fingerprint
from turboserve.worker.model.presets import preset
from turboserve.worker.service.models import SHIPPED_FIDELITY

POLICIES = ("best", "in-time")
"""Fidelity policies that are compared, in the order of their runs."""
MODEL = "toyworld"
WORKERS = 2
SESSIONS = 6
"""As many on each worker: all slots are taken, so no policy can migrate a session."""
LOAD = 1.3
"""Work of the sessions at best fidelity, relative to what the workers carry."""
WATCH_S, QUICK_WATCH_S = 60.0, 25.0
LEAST_IDLE = 0.25
"""Share of the machine's processor time that must stay idle. With less, the workers' pace is not theirs."""
FIRST_CHUNK_S = 60.0
READY_S = 60.0


@dataclass(frozen=True)
class PacedLoad:
    """The declared device and its load."""

    chunk_s: float
    """Playing time of one chunk."""
    sessions: int = SESSIONS
    workers: int = WORKERS
    load: float = LOAD

    @property
    def forward_s(self) -> float:
        """Time of a forward of one row, with which the sessions need `load` times the workers' time."""
        return self.load * self.workers * self.chunk_s / (self.sessions * FORWARDS)

    @property
    def device(self) -> PacedDevice:
        """A device without any gain by batching."""
        return PacedDevice({1: self.forward_s})

    @property
    def multiple(self) -> float:
        """The same, relative to toyworld's forward on a CPU."""
        return self.forward_s / TOYWORLD_FORWARD_S[1]


def paced_profile(forward_s: float) -> FidelityProfile:
    """Return toyworld's measured qualities, with the latencies of a paced device.

    Such a device saves no time by a shorter window or by sparsity, so configurations with them are left out.
    """
    config = preset(MODEL)
    shipped = FidelityProfile.read(SHIPPED_FIDELITY[MODEL], config, model=fingerprint(config), device="cpu")
    window = max(each.fidelity.window_chunks for each in shipped.measured)
    measured = [
        MeasuredFidelity(each.fidelity, (each.fidelity.steps + 1) * forward_s, each.quality, each.interval)
        for each in shipped.measured
        if each.fidelity.window_chunks == window and each.fidelity.sparsity == 0.0
    ]
    return FidelityProfile(shipped.model, shipped.device, shipped.prompts, tuple(measured))


def run_real(quick: bool, seed: int) -> dict[str, Any]:
    """Run the same sessions once for each policy, on a stack of its own. Raises BenchError."""
    load = PacedLoad(preset(MODEL).chunk_media_s)
    watch_s = QUICK_WATCH_S if quick else WATCH_S
    runs = {policy: _run(policy, load, watch_s, seed) for policy in POLICIES}
    void = any(run["void"] is not None for run in runs.values())
    return {
        "definitions": {
            "load": "Time for all chunks at best fidelity, relative to the workers' time.",
            "stalls": "How often playing stopped because the next chunk was missing.",
            "quality": "The judge's score of the delivered video, which shows the prompt's scene at 1.",
            "lowered": "Share of chunks at a configuration below the best.",
            "cpu_idle": "Share of the machine's processor time that was idle.",
            "void": "Why the run does not count; null: it counts.",
            "as_expected": "Whether `best` stalls and `in-time` does not; null: a run does not count.",
        },
        "workers": load.workers,
        "sessions": load.sessions,
        "load": load.load,
        "forward_s": load.forward_s,
        "multiple_of_toyworld": load.multiple,
        "watch_s": watch_s,
        "runs": runs,
        "as_expected": None if void else runs["best"]["stalls"] > 0 and runs["in-time"]["stalls"] == 0,
    }


def _run(policy: str, load: PacedLoad, watch_s: float, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "turboserve.bench.paced.worker", load.device.to_json()]
    with tempfile.TemporaryDirectory(prefix="turboserve-slack-") as directory:
        profile = Path(directory) / "fidelity.json"
        paced_profile(load.forward_s).write(profile)
        environment = {
            "TURBOSERVE_POOL_WORKER_COMMAND": json.dumps(command),
            "TURBOSERVE_WORKER_MAX_SESSIONS": str(load.sessions // load.workers),
            "TURBOSERVE_FIDELITY": policy,
            "TURBOSERVE_FIDELITY_PROFILE": str(profile),
            "OMP_NUM_THREADS": "1",
        }
        stack = BackgroundStack(
            Path(directory) / "data", "--workers", str(load.workers), environment=environment
        )
        try:
            with stack:
                viewers, jobs, busy = asyncio.run(_watch(stack.url, load, watch_s, seed))
        except StackStartError as error:
            raise BenchError(f"the stack did not start:\n{error}") from None
        except (httpx.HTTPError, ProblemError, TimeoutError, OSError) as error:
            raise BenchError(f"{str(error) or type(error).__name__}\n{stack.output[-2000:]}") from error
    return report(viewers, jobs, busy)


async def _watch(
    url: str, load: PacedLoad, watch_s: float, seed: int
) -> tuple[list[Viewer], list[Job], dict[str, float]]:
    jobs = held_out_jobs(load.sessions, seed)
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30.0))
        await _until_ready(api, load.workers)
        viewers = [
            await Viewer.create(api, job.prompt, keep_video=True, seed=job.seed % 2**31) for job in jobs
        ]
        async with AsyncExitStack() as watching:
            for viewer in viewers:
                await watching.enter_async_context(viewer.watching())
            for viewer in viewers:
                await viewer.more_chunks(1, FIRST_CHUNK_S)
            before = psutil.cpu_times()
            await asyncio.sleep(watch_s)
            after = psutil.cpu_times()
            for viewer in viewers:
                viewer.player.tick(time.monotonic())
        for viewer in viewers:
            await viewer.delete()
    spent = {name: getattr(after, name) - getattr(before, name) for name in after._fields}
    return viewers, jobs, spent


async def _until_ready(api: httpx.AsyncClient, workers: int) -> None:
    """Wait until all workers serve. Otherwise the first one would get all sessions."""
    deadline_s = time.monotonic() + READY_S
    while True:
        answer = await api.get("/v1/pools/local")
        if answer.is_success and answer.json()["ready"] >= workers:
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"fewer than {workers} workers are ready after {READY_S:g} s")
        await asyncio.sleep(0.2)


def report(viewers: Sequence[Viewer], jobs: Sequence[Job], spent: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of one run. `spent`: seconds of processor time by kind.

    Raises BenchError for a session without video that a player would play.
    """
    for viewer in viewers:
        if not viewer.chunks:
            raise BenchError(f"session {viewer.session}: no chunk")
    idle = (spent["idle"] + spent.get("iowait", 0.0)) / sum(spent.values())
    chunks = [chunk for viewer in viewers for chunk in viewer.chunks]
    scores = []
    for viewer, job in zip(viewers, jobs, strict=True):
        try:
            scores.append(score(judge(decode(viewer.video()).frames), job.scene))
        except (av.FFmpegError, ValueError) as error:
            raise BenchError(f"session {viewer.session}: no video to judge: {error!r}") from error
    mean = statistics.fmean(scores)
    return {
        "stalls": sum(viewer.player.stalls for viewer in viewers),
        "sessions_stalled": sum(viewer.player.stalls > 0 for viewer in viewers),
        "stall_s": round(sum(viewer.player.stall_s for viewer in viewers), 3),
        "chunks": len(chunks),
        "lost": sum(viewer.player.lost for viewer in viewers),
        "lowered": sum(chunk.fidelity is not None for chunk in chunks) / len(chunks),
        "workers": {
            name: sum(viewer.chunks[-1].worker == name for viewer in viewers)
            for name in sorted({viewer.chunks[-1].worker for viewer in viewers})
        },
        "quality": mean,
        "quality_ci95": list(wilson_interval(mean, len(scores))),
        "cpu_idle": round(idle, 3),
        "void": void_reason(idle),
    }


def void_reason(idle: float) -> str | None:
    """Return why a run does not count in which this share of the processor time was idle; None: it counts."""
    return None if idle >= LEAST_IDLE else f"{idle:.2f} of the CPU idle, at least {LEAST_IDLE:g} needed"


def table(result: Mapping[str, Any]) -> Table:
    """Format the result of `run_real`."""
    title = f"{result['sessions']} sessions, {result['workers']} workers, load {result['load']:g}"
    names = ("stalls", "stall_s", "chunks", "lowered", "quality", "cpu_idle", "void")
    shown = Table("fidelity", *names, title=title, box=box.SIMPLE)
    for policy, run in result["runs"].items():
        cells = (run[name] for name in names)
        shown.add_row(
            policy, *("" if c is None else f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells)
        )
    return shown

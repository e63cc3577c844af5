"""The real side: the whole stack with paced workers, and viewers that play a trace in real time."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from turboserve.autoscaler.control.events import SessionChange
from turboserve.bench.report import BenchError
from turboserve.bench.streaming.problems import ProblemError
from turboserve.bench.streaming.received import Received
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import UP, BackgroundStack, StackStartError
from turboserve.experiments.agreement import recording
from turboserve.experiments.agreement.declared import BUSIEST, REPORT_S, SETTLE_S, Declared
from turboserve.experiments.agreement.outcome import SeenChunk, figures
from turboserve.experiments.agreement.up import FOLDER
from turboserve.experiments.autoscale.trace import Step, WorkloadTrace

PROMPT = "a red circle"
COMMAND = (UP[0], "-m", "turboserve.experiments.agreement.up")
REQUEST_S = 30.0
READY_S = 60.0


class TraceViewers:
    """Viewers that make each session's changes at the times of a trace."""

    def __init__(self, api: httpx.AsyncClient, trace: WorkloadTrace, report_s: float) -> None:
        self.chunks: list[SeenChunk] = []
        self.viewers: list[Viewer] = []
        self.begins_s = time.monotonic()
        self._api, self._trace, self._report_s = api, trace, report_s

    async def follow(self, stack: BackgroundStack) -> ProcessorUse:
        """Play the whole trace. Returns the use of the processor meanwhile."""
        by_session: dict[str, list[Step]] = {}
        for step in self._trace.steps:
            by_session.setdefault(step.session, []).append(step)
        self.begins_s, before, own = time.monotonic(), psutil.cpu_times(), own_seconds(stack)
        tasks = [
            asyncio.create_task(self._session(number, name, steps))
            for number, (name, steps) in enumerate(by_session.items(), 1)
        ]
        try:
            ended, _ = await asyncio.wait(
                tasks, timeout=self._trace.ends_s, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in ended:
                # An error of a session ends the run.
                task.result()
            await self._until(self._trace.ends_s)
            after, seconds = psutil.cpu_times(), own_seconds(stack) - own
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for viewer in self.viewers:
            viewer.player.tick(self.begins_s + self._trace.ends_s)
        cores = psutil.cpu_count() or 1
        return ProcessorUse(busy(before, after), seconds / (cores * self._trace.ends_s))

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, self.begins_s + at_s - time.monotonic()))

    async def _session(self, number: int, name: str, steps: Sequence[Step]) -> None:
        await self._until(steps[0].at)
        viewer = await Viewer.create(self._api, PROMPT, seed=number)
        viewer.report_s = self._report_s
        viewer.on_chunk = lambda received: self._received(name, received)
        self.viewers.append(viewer)
        async with viewer.watching():
            for step in steps[1:]:
                await self._until(step.at)
                if step.kind is SessionChange.IDLING:
                    await viewer.pause()
                elif step.kind is SessionChange.ACTIVATION:
                    await viewer.resume()
                else:
                    await viewer.delete()
                    viewer.player.pause(True, time.monotonic())
                    return
            # A session that the trace does not end plays until the run ends.
            await asyncio.Event().wait()

    def _received(self, name: str, chunk: Received) -> None:
        at_s = time.monotonic() - self.begins_s
        if at_s < self._trace.ends_s:
            self.chunks.append(SeenChunk(name, chunk.index, chunk.worker, chunk.compute_s, at_s))


@dataclass(frozen=True)
class ProcessorUse:
    """Shares of the machine's processor time."""

    busy: float
    """Of all that runs on the machine."""
    own: float
    """Of the stack and its viewers. Workers that ended meanwhile are left out."""


def own_seconds(stack: BackgroundStack) -> float:
    """Return the processor time that the stack's living processes and this one have used."""
    seconds = 0.0
    for process in [psutil.Process(), psutil.Process(stack.process.pid), *stack.descendants()]:
        with suppress(psutil.NoSuchProcess):
            used = process.cpu_times()
            seconds += used.user + used.system
    return seconds


def busy(before: Any, after: Any) -> float:
    """Return the busy share of the processor time between two of `psutil.cpu_times`."""
    spent = {name: getattr(after, name) - getattr(before, name) for name in after._fields}
    whole = sum(spent.values())
    return 1.0 - (spent["idle"] + spent.get("iowait", 0.0)) / whole if whole else 0.0


def void_reason(share: float) -> str | None:
    """Return why a run with this busy share does not count; None: it counts."""
    return None if share <= BUSIEST else f"{share:.2f} of the CPU busy, at most {BUSIEST:g} allowed"


def run(declared: Declared, settle_s: float = SETTLE_S) -> dict[str, Any]:
    """Play the trace on a stack of its own. Returns the figures of the run. Raises BenchError.

    `settle_s`: see `played`.
    """
    size = declared.size
    workers = f"{size.least}..{size.workers}"
    trace = size.trace(declared.draw)
    return played(declared.environment(), workers, size.least, trace, REPORT_S, settle_s)[0]


def played(
    environment: Mapping[str, str],
    workers: str,
    least: int,
    trace: WorkloadTrace,
    report_s: float,
    settle_s: float = SETTLE_S,
) -> tuple[dict[str, Any], list[SeenChunk]]:
    """Play a trace on a new stack. Returns the figures and the chunks. Raises BenchError.

    `workers`: as for `turboserve up`. The trace begins `settle_s` seconds after `least` workers are ready.
    """
    with tempfile.TemporaryDirectory(prefix="turboserve-agreement-") as directory:
        folder = Path(directory)
        stack = BackgroundStack(
            folder / "data",
            "--workers",
            workers,
            environment={**environment, FOLDER: str(folder), "OMP_NUM_THREADS": "1"},
            command=COMMAND,
        )
        try:
            with stack:
                viewers, use = asyncio.run(_follow(stack, least, trace, report_s, settle_s))
        except StackStartError as error:
            raise BenchError(f"the stack did not start:\n{error}") from None
        except (httpx.HTTPError, ProblemError, TimeoutError, OSError) as error:
            raise BenchError(f"{str(error) or type(error).__name__}\n{stack.output[-2000:]}") from error
        recordings = recording.read(folder)
    players = [viewer.player for viewer in viewers.viewers]
    found = figures(recordings, viewers.chunks, players, viewers.begins_s, trace.ends_s)
    found |= {"cpu_busy": round(use.busy, 3), "cpu_own": round(use.own, 3), "void": void_reason(use.busy)}
    return found, viewers.chunks


async def _follow(
    running: BackgroundStack, least: int, trace: WorkloadTrace, report_s: float, settle_s: float
) -> tuple[TraceViewers, ProcessorUse]:
    limits = httpx.Limits(max_connections=200)
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(
            httpx.AsyncClient(base_url=running.url, timeout=REQUEST_S, limits=limits)
        )
        await _until_ready(api, least)
        await asyncio.sleep(settle_s)
        viewers = TraceViewers(api, trace, report_s)
        return viewers, await viewers.follow(running)


async def _until_ready(api: httpx.AsyncClient, workers: int) -> None:
    deadline_s = time.monotonic() + READY_S
    while True:
        answer = await api.get("/v1/pools/local")
        if answer.is_success and answer.json()["ready"] >= workers:
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"fewer than {workers} workers are ready after {READY_S:g} s")
        await asyncio.sleep(0.2)

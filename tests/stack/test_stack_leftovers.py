"""A stack leaves no process running, however it ends; its data exists at the next start."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers import patient_stack
from tests.helpers.forked_process import InterpretedStack
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack

pytestmark = pytest.mark.stack

FIRST_S = 120.0
GONE_S = 120.0
ENVIRONMENT = {
    **patient_stack.DEADLINES,
    # There is one session. A worker that can have more also warms up batches.
    "TURBOSERVE_WORKER_MAX_SESSIONS": "1",
}
STILL_S = 4.0
"""Time in which several chunks are made."""
STILL_READS = 2
WINDOW_CHUNKS = 3
"""Chunks in toyworld's window: nine latent frames, three a chunk."""


def still_running(processes: list[psutil.Process], limit_s: float) -> list[str]:
    """Return the commands of those `processes` that live after at most `limit_s` seconds."""
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    return [" ".join(process.cmdline()) for process in alive if process.is_running()]


def rebuilt_whole(stack: BackgroundStack, viewer: Viewer, times: int) -> None:
    """Check that the session was taken over `times` times, each with the latents of its whole window."""

    def lines() -> list[str]:
        return [line for line in stack.output.splitlines() if "session taken over" in line]

    # A worker's log lines are printed a moment later.
    stack.wait(lambda: len(lines()) >= times, FIRST_S)
    taken = lines()
    assert len(taken) == times, taken
    assert "latents lost" not in stack.output
    for line in taken:
        found = dict(re.findall(r"(chunk|chunks_of_latents)=(\d+)", line))
        assert int(found["chunks_of_latents"]) == min(int(found["chunk"]), WINDOW_CHUNKS), line


async def no_more_chunks(viewer: Viewer) -> None:
    """Wait until no chunk is made for a while, as if unwatched: latents are kept after their chunk."""
    deadline_s = time.monotonic() + GONE_S
    made, still = None, 0
    # On a busy machine, one chunk may take longer than `STILL_S`.
    while still < STILL_READS:
        await asyncio.sleep(STILL_S)
        before, made = made, (await viewer.get())["next_chunk"]
        still = still + 1 if made == before else 0
        assert time.monotonic() < deadline_s, "an unwatched session makes more and more chunks"


async def test_a_stack_stops_clean_starts_again_with_its_sessions_and_leaves_nothing_when_killed(
    data_dir: Path,
) -> None:
    # Of the three runs, the one that is killed is as in production: orphans of forks have another parent.
    stack = BackgroundStack(data_dir, "--workers", "1", environment=ENVIRONMENT)
    with stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=FIRST_S) as api:
            viewer = await Viewer.create(api, "a red circle moving left", seed=1)
            async with viewer.watching():
                await viewer.more_chunks(3, FIRST_S)
        first_run = stack.descendants()
        assert stack.stop() == 0
        assert still_running(first_run, GONE_S) == []

    killed = InterpretedStack(data_dir, "--workers", "1", environment=ENVIRONMENT)
    with killed:
        async with httpx.AsyncClient(base_url=killed.url, timeout=FIRST_S) as api:
            # The same session, from this viewer's position, although everything was restarted in between.
            viewer.api = api
            async with viewer.watching():
                await viewer.more_chunks(3, FIRST_S)
            await no_more_chunks(viewer)
        assert (viewer.player.lost, viewer.player.repeated) == (0, 0)
        rebuilt_whole(stack, viewer, times=1)

        second_run = killed.descendants()
        assert any("turboserve.worker" in " ".join(process.cmdline()) for process in second_run)
        os.kill(killed.process.pid, signal.SIGKILL)
        killed.process.wait()
        assert still_running(second_run, GONE_S) == []

    with stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=FIRST_S) as api:
            viewer.api = api
            async with viewer.watching():
                await viewer.more_chunks(3, FIRST_S)
        assert (viewer.player.lost, viewer.player.repeated) == (0, 0)
        rebuilt_whole(stack, viewer, times=2)

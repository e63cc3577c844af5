"""A stack with decode workers: the same video bit for bit, and no chunk is lost with either half.

One session plays while its decode worker freezes, dies and returns, and while it migrates and its own worker
dies. Its log is compared with that of an equal session on a stack without decode workers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import httpx
import psutil
import pytest

from tests.helpers import patient_stack
from tests.stack.test_stack_migrations import migrate, migrated, ready_workers
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack
from turboserve.experiments.chaos import chunklog
from turboserve.experiments.chaos.invariants import Logged, Violations, check_log

pytestmark = pytest.mark.stack

LIMIT_S = 120.0
PROMPT, SEED = "a red circle moving left", 5
DECODER = "decode-worker"
ENOUGH = 40
"""Least length of the reference. A test compares more chunks only on a slow machine."""
MODEL = "--model", "toyworld-small"
SETTINGS = {
    **patient_stack.PATIENT,
    "TURBOSERVE_REBALANCE": "false",
    "TURBOSERVE_CHUNKS_KEPT": "1000",
    # There is one session. A worker that can have more also warms up batches.
    "TURBOSERVE_WORKER_MAX_SESSIONS": "1",
    # Two stacks make the same video. Lowered chunks depend on the load.
    "TURBOSERVE_FIDELITY": "best",
}
PATIENT = {**SETTINGS, "TURBOSERVE_DECODE_TIMEOUT_S": "30"}
"""A slow machine is not taken for a frozen decode worker."""


async def logged(stack: BackgroundStack, session: str) -> list[Logged]:
    entries = (await chunklog.read(stack.record.nats_url))[session]
    return [entry for entry in entries if isinstance(entry, Logged)]


def metric(port: int, name: str) -> float:
    """Sum of a metric's series in a process."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def decoded(stack: BackgroundStack, name: str = DECODER) -> float:
    """Chunks that a decode worker has decoded."""
    port = stack.record.processes[name]["port"]
    return metric(port, "turboserve_worker_decode_duration_seconds_count")


def rebuilt(stack: BackgroundStack) -> float:
    """Caches that the decode worker has rebuilt."""
    return metric(stack.record.processes[DECODER]["port"], "turboserve_worker_decode_rebuilt_total")


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        try:
            if await asyncio.to_thread(condition):
                return
        except (httpx.HTTPError, LookupError, psutil.Error):
            # A process that is being replaced.
            pass
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.1)


class Reference:
    """The log of the session on a stack whose workers decode themselves, for all tests."""

    entries: ClassVar[list[Logged]] = []


async def reference(data: Path, chunks: int) -> list[Logged]:
    """At least so many entries of the reference."""
    if len(Reference.entries) < chunks:
        Reference.entries = await decoded_together(data, max(chunks, ENOUGH))
    return Reference.entries


async def decoded_together(data: Path, chunks: int) -> list[Logged]:
    with BackgroundStack(data, "--workers", "1", *MODEL, environment=SETTINGS) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=LIMIT_S) as api:
            # Nothing needs the pace of a viewer here.
            viewer = await Viewer.create(api, PROMPT, seed=SEED, max_lead_s=60)
            async with viewer.watching():
                await viewer.more_chunks(chunks, LIMIT_S)
                found = await logged(stack, viewer.session)
                await viewer.delete()
    return found


async def test_the_video_is_the_same_with_decode_workers_whatever_happens_to_them(tmp_path: Path) -> None:
    arguments = ("--workers", "2", "--decode-workers", "1", *MODEL)
    with BackgroundStack(tmp_path / "split", *arguments, environment=PATIENT) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=LIMIT_S) as api:
            workers = await ready_workers(api, 2, LIMIT_S)
            viewer = await Viewer.create(api, PROMPT, keep_video=True, seed=SEED)
            async with viewer.watching():
                await viewer.more_chunks(4, LIMIT_S)
                await until(lambda: decoded(stack) >= 2, "the decode worker decodes nothing")

                # The decode worker dies, and its successor rebuilds the cache.
                pid = stack.kill(DECODER)
                await viewer.more_chunks(2, LIMIT_S)
                await asyncio.to_thread(stack.wait_until_back, DECODER, pid, LIMIT_S)
                await until(lambda: rebuilt(stack) >= 1, "the new decode worker decodes nothing")
                await viewer.more_chunks(2, LIMIT_S)

                # The session migrates. The cache stays where it is.
                home = (await viewer.get())["worker"]
                [target] = workers - {home}
                await migrate(api, viewer.session, workers)
                await migrated(viewer, target)
                before = decoded(stack)
                await viewer.more_chunks(2, LIMIT_S)
                await until(lambda: decoded(stack) > before, "the session's new worker decodes by itself")

                # Its own worker dies.
                pids = {_worker_id(pid): pid for pid in stack.record.worker_pids()}
                os.kill(pids[target], signal.SIGKILL)
                await viewer.event("session.placed", LIMIT_S, previous_worker=target)
                await viewer.more_chunks(3, LIMIT_S)
                entries = (await chunklog.read(stack.record.nats_url))[viewer.session]
                found = Violations()
                check_log(viewer.session, entries, [], found)
                assert not found.messages
                split = [entry for entry in entries if isinstance(entry, Logged)]
                await viewer.delete()
    assert (viewer.player.lost, viewer.player.repeated) == (0, 0)
    assert [chunk.index for chunk in viewer.chunks] == list(range(len(viewer.chunks)))
    # What is rebuilt from a window of latents continues as nearly as it can, with both roles as well.
    last = split[-1].epoch
    same = [(entry.index, entry.digest) for entry in split if entry.epoch < last]
    assert len(same) > 10
    together = await reference(tmp_path / "together", len(same))
    assert [(entry.index, entry.digest) for entry in together[: len(same)]] == same


def _worker_id(pid: int) -> str:
    return str(psutil.Process(pid).environ()["TURBOSERVE_WORKER_ID"])


async def test_a_frozen_decode_worker_costs_no_chunk(tmp_path: Path) -> None:
    # A deadline that a decode worker of a busy machine may exceed: that costs no chunk either.
    # Links over gloo. In the test before, they are of shared memory.
    environment = {
        **SETTINGS,
        "TURBOSERVE_DECODE_TIMEOUT_S": "0.5",
        "TURBOSERVE_TRANSFER_BACKENDS": '["gloo"]',
    }
    arguments = ("--workers", "1", "--decode-workers", "2", *MODEL)
    with BackgroundStack(tmp_path / "data", *arguments, environment=environment) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=LIMIT_S) as api:
            viewer = await Viewer.create(api, PROMPT, keep_video=True, seed=SEED)
            names = (DECODER, f"{DECODER}-2")
            async with viewer.watching():
                await viewer.more_chunks(3, LIMIT_S)
                await until(lambda: sum(decoded(stack, name) for name in names) > 0, "nothing is decoded")
                frozen = [stack.record.pid(name) for name in names]
                for pid in frozen:
                    os.kill(pid, signal.SIGSTOP)
                try:
                    # The worker decodes them.
                    await viewer.more_chunks(6, LIMIT_S)
                finally:
                    for pid in frozen:
                        # The supervisor replaces one that does not answer for long.
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGCONT)
                await viewer.more_chunks(2, LIMIT_S)
                split = await logged(stack, viewer.session)
                await viewer.delete()
    assert (viewer.player.lost, viewer.player.repeated) == (0, 0)
    together = await reference(tmp_path / "together", len(split))
    assert [entry.digest for entry in split] == [entry.digest for entry in together[: len(split)]]

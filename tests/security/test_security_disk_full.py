"""A disk that was full for a while, and frozen servers: video continues without manual repair."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers import forked_process
from tests.helpers.tiny_workers import TINY_WORKERS
from tests.helpers.waiting import eventually
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack
from turboserve.cli.stack.plan import SERVER_FAILING_LIMIT
from turboserve.experiments.chaos.simulated_clients import with_retry
from turboserve.experiments.chaos.small_disk import SmallDisk, why_not

UP = (sys.executable, str(Path(__file__).with_name("up_impatient.py")))
DISK_BYTES = 512 * 2**20
FIRST_CHUNK_S = 120.0
MORE_THAN_A_RESTART_NEEDS = 2 * SERVER_FAILING_LIMIT
"""Number of failing answers that would lead to a restart if there were room."""
AS_IN_THE_ATTACK = 96
"""Number of failing answers in the 48 s for which an attack kept the disk full."""
PATIENCE_S = 90.0
"""Time limit on a busy machine. Without a restart of the broker the stream never continues."""

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    with SmallDisk(tmp_path_factory.mktemp("small") / "disk", DISK_BYTES) as disk:
        yield disk


@pytest.fixture(scope="module")
def stack(disk: SmallDisk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundStack]:
    """A whole stack whose data is on the small disk."""
    environment = {**TINY_WORKERS, "TURBOSERVE_WORKER_MAX_SESSIONS": "4"}
    stack = BackgroundStack(disk.path / "data", "--workers", "1", environment=environment, command=UP)
    stack.log = tmp_path_factory.mktemp("log") / "stack.log"
    with stack:
        try:
            yield stack
        finally:
            disk.free()


@pytest.fixture
async def viewer(stack: BackgroundStack) -> AsyncIterator[Viewer]:
    """A viewer of a playing session."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE_S) as api:
        # Creation is refused for a moment after the disk was full.
        viewer = await with_retry(lambda: Viewer.create(api, "a red circle moving left", seed=1))
        async with viewer.watching():
            await viewer.more_chunks(2, FIRST_CHUNK_S)
            yield viewer
        await viewer.delete()


def status(stack: BackgroundStack) -> str:
    """Return the output of `turboserve status`."""
    done = forked_process.run(["-m", "turboserve.cli.main", "status", "--data", str(stack.data)])
    assert done.returncode == 0, done.stderr
    return done.stdout


async def wait_for(stack: BackgroundStack, **alarms: bool) -> None:
    """Wait until servers have an alarm, or have none."""

    def so() -> bool:
        processes = stack.record.processes
        return all((processes[name]["alarm"] is not None) == wanted for name, wanted in alarms.items())

    await asyncio.to_thread(stack.wait, so, PATIENCE_S)


def failing_answers(stack: BackgroundStack) -> int:
    """Return how many health checks the broker has failed. `up_impatient.py` prints each result."""
    return stack.output.count("health check of nats: FAILS")


class BrokerRestarts:
    """Counts restarts of the broker, and those for which a busy machine was too slow to answer."""

    def __init__(self, stack: BackgroundStack) -> None:
        self._stack = stack
        self._before = self._count(), self._hung()

    def _count(self) -> int:
        return int(self._stack.record.processes["nats"]["restarts"])

    def _hung(self) -> int:
        return self._stack.output.count("health checks of nats: too many without an answer")

    @property
    def count(self) -> int:
        return self._count() - self._before[0]

    @property
    def hung(self) -> int:
        return self._hung() - self._before[1]


async def fill(disk: SmallDisk, seconds: float) -> None:
    """Keep the disk full for `seconds`: servers free space."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        disk.fill()
        await asyncio.sleep(0.2)


async def play_on(viewer: Viewer) -> None:
    """Check that the next chunks come, in order and once each."""
    await viewer.more_chunks(3, PATIENCE_S)
    assert [chunk.index for chunk in viewer.chunks] == list(range(len(viewer.chunks)))
    assert viewer.player.repeated == 0


async def go_through_a_full_disk(
    stack: BackgroundStack, disk: SmallDisk, viewer: Viewer, answers: int
) -> None:
    """Keep the disk full until the broker has given so many failing answers after its alarm."""
    restarts = BrokerRestarts(stack)
    filling = asyncio.create_task(fill(disk, 3600.0))
    try:
        await wait_for(stack, nats=True)
        told = await asyncio.to_thread(status, stack)
        assert "ALARM nats" in told
        assert "is full" in told
        before = failing_answers(stack)
        await asyncio.to_thread(stack.wait, lambda: failing_answers(stack) >= before + answers, PATIENCE_S)
        assert restarts.count <= restarts.hung, "a restart does not make room"
    finally:
        filling.cancel()
        await asyncio.wait([filling])
        disk.free()
    await play_on(viewer)
    await wait_for(stack, nats=False)
    assert 1 <= restarts.count <= 1 + restarts.hung
    assert "ALARM" not in await asyncio.to_thread(status, stack)


async def test_video_goes_on_after_the_disk_was_full(
    stack: BackgroundStack, disk: SmallDisk, viewer: Viewer
) -> None:
    await go_through_a_full_disk(stack, disk, viewer, MORE_THAN_A_RESTART_NEEDS)


async def test_servers_that_are_killed_on_a_full_disk_start_on_it(
    stack: BackgroundStack, disk: SmallDisk
) -> None:
    """Without them no client could even watch existing video."""
    filling = asyncio.create_task(fill(disk, 3600.0))
    try:
        for name in ("nats", "redis"):
            await eventually(lambda: disk.free_bytes < 2**20, PATIENCE_S)
            pid = await asyncio.to_thread(stack.kill, name)
            await asyncio.to_thread(stack.wait_until_back, name, pid, PATIENCE_S)
            # Space that a server frees at its start is taken again.
            await eventually(lambda: disk.free_bytes < 2**20, PATIENCE_S)
    finally:
        filling.cancel()
        await asyncio.wait([filling])
        disk.free()


@pytest.mark.soak
async def test_video_goes_on_after_the_disk_was_full_for_as_long_as_in_the_attack(
    stack: BackgroundStack, disk: SmallDisk, viewer: Viewer
) -> None:
    await go_through_a_full_disk(stack, disk, viewer, AS_IN_THE_ATTACK)


@pytest.mark.parametrize(
    "name", ["nats", *(pytest.param(name, marks=pytest.mark.soak) for name in ("postgres", "redis"))]
)
async def test_a_frozen_server_is_replaced_and_video_goes_on(
    stack: BackgroundStack, viewer: Viewer, name: str
) -> None:
    """The server is never resumed. It is replaced instead of waited for."""
    pid = stack.record.pid(name)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.to_thread(stack.wait_until_back, name, pid, PATIENCE_S)
    assert "does not answer" in stack.output
    await play_on(viewer)

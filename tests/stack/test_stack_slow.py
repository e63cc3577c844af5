"""Slow connections and disks of a whole stack: `/readyz` says what the reference says, and no chunk is lost.

The rows come from the table in `docs/reference/failures.md`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers import prepared_cluster
from tests.helpers.tiny_workers import TINY_COMMAND
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack
from turboserve.experiments.chaos import chunklog, slow_disk
from turboserve.experiments.chaos.degradations import DISKS, NETWORKS
from turboserve.experiments.chaos.invariants import Violations, check_log
from turboserve.experiments.chaos.network_proxy import UNDISTURBED
from turboserve.experiments.chaos.run import UP
from turboserve.experiments.chaos.simulated_clients import SimulatedClient
from turboserve.experiments.chaos.slow_disk import FAST, SlowDisk
from turboserve.experiments.chaos.stack_network import VIEWERS, StackNetwork
from turboserve.experiments.chaos.up import PREFIXES

pytestmark = pytest.mark.stack

REFERENCE = Path(__file__).parents[2] / "docs/reference/failures.md"
HEADING = "## Slow networks and disks"
LIMIT_S = 90.0
DISK_OWNERS = ("nats", "postgres")
TIMES = {"TURBOSERVE_CANARY_INTERVAL_S": "0.5", "TURBOSERVE_CANARY_TIMEOUT_S": "2.5"}
"""Shorter than by default, so that each row takes less time."""


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    slow: str
    """A proxy of `StackNetwork`, or the server whose disk is slow."""
    how: str
    """Name of the conditions, of `NETWORKS` or `DISKS`."""
    service: str
    names: frozenset[str]
    ready: bool


def rows() -> list[Row]:
    section = REFERENCE.read_text().split(HEADING, 1)[1].split("\n## ", 1)[0]
    found = []
    for line in section.splitlines():
        cells = [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 5 and cells[4] in ("yes", "no"):
            slow, how, service, names, ready = cells
            found.append(Row(slow, how, service, frozenset(names.split(", ")), ready == "yes"))
    return found


class SlowStack:
    """A stack whose connections and disks can be slow, with one watched session."""

    def __init__(
        self, stack: BackgroundStack, network: StackNetwork, disks: dict[str, SlowDisk], url: str
    ) -> None:
        self.stack, self.network, self.disks, self.url = stack, network, disks, url

    def set(self, row: Row | None) -> None:
        """Make slow what `row` names; None: nothing."""
        if row is None:
            self.network.set(UNDISTURBED)
            for disk in self.disks.values():
                disk.conditions = FAST
        elif row.slow in self.disks:
            self.disks[row.slow].conditions = DISKS[row.how]
        else:
            self.network.degrade(row.slow, NETWORKS[row.how])

    async def readyz(self, service: str) -> tuple[bool, frozenset[str]]:
        """Return whether the service is ready, and the names of its failing conditions and warnings."""
        record = self.stack.record
        if service == "worker":
            [pid, *_] = record.worker_pids()
            port = int(psutil.Process(pid).environ()["TURBOSERVE_HEALTH_PORT"])
        else:
            port = record.processes[service]["port"]
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:
            answer = await client.get(f"http://127.0.0.1:{port}/readyz")
        body = answer.json()
        missing = {name for name, holds in body["checks"].items() if not holds}
        assert all(body["warnings"].values()), "each warning has a text"
        return answer.is_success, frozenset(missing | body["warnings"].keys())

    async def until(self, service: str, condition: Callable[[bool, frozenset[str]], bool]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        seen: object = None
        while time.monotonic() < deadline_s:
            try:
                seen = ready, names = await self.readyz(service)
                if condition(ready, names):
                    return
            except (httpx.HTTPError, ValueError, LookupError, psutil.Error) as error:
                seen = error
            await asyncio.sleep(0.1)
        raise AssertionError(f"{service}: /readyz is {seen}")


@pytest.fixture(scope="module")
def slow_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowStack]:
    data = tmp_path_factory.mktemp("slow") / "data"
    # Before the network, which begins the folder.
    prepared_cluster.copy_cluster_to(data)
    with ExitStack() as opened:
        network = opened.enter_context(StackNetwork(data))
        disks = {}
        if slow_disk.why_not() is None:
            disks = {name: opened.enter_context(SlowDisk()) for name in DISK_OWNERS}
        prefixes = {**network.prefixes, **{name: disk.command() for name, disk in disks.items()}}
        worker = [*network.worker_prefix, *TINY_COMMAND]
        environment = {
            **TIMES,
            PREFIXES: json.dumps(prefixes),
            "TURBOSERVE_POOL_WORKER_COMMAND": json.dumps(worker),
        }
        stack = opened.enter_context(BackgroundStack(data, environment=environment, command=UP))
        [viewers] = network.serve_viewers_of([stack.url])
        yield SlowStack(stack, network, disks, viewers)


@asynccontextmanager
async def watched(slow_stack: SlowStack) -> AsyncIterator[SimulatedClient]:
    """Watch a session, and check at the end that its log and its viewer have each chunk once."""
    async with httpx.AsyncClient(base_url=slow_stack.url, timeout=LIMIT_S) as api:
        client = SimulatedClient(0, await Viewer.create(api, "a red circle moving left", keep_video=True))
        async with client.viewer.watching():
            await client.viewer.until(lambda: len(client.seen) > 1, LIMIT_S, "two chunks")
            yield client
            seen = len(client.seen)
            await client.viewer.until(lambda: len(client.seen) > seen + 1, LIMIT_S, "two more chunks")
            session = client.viewer.session
            received = list(client.seen)
            log = await chunklog.read(slow_stack.stack.record.nats_url)
            found = Violations()
            check_log(session, log[session], received, found)
            assert not found.messages
            await client.end()


async def test_readyz_says_what_is_slow_and_no_chunk_is_lost(slow_stack: SlowStack) -> None:
    table = [row for row in rows() if row.slow in slow_stack.network.links or row.slow in slow_stack.disks]
    assert len(table) >= 8
    async with watched(slow_stack):
        for row in table:
            slow_stack.set(row)
            try:
                await slow_stack.until(
                    row.service,
                    lambda ready, names, row=row: ready == row.ready and row.names <= names,  # type: ignore[misc]
                )
            finally:
                slow_stack.set(None)
            await slow_stack.until(
                row.service,
                lambda ready, names, row=row: ready and not row.names & names,  # type: ignore[misc]
            )


async def test_a_viewer_behind_a_lossy_network_gets_each_chunk_once(slow_stack: SlowStack) -> None:
    async with watched(slow_stack) as client:
        slow_stack.network.degrade(VIEWERS, NETWORKS["lossy"])
        proxy = slow_stack.network[f"{VIEWERS}.0"]
        resets = proxy.resets
        await client.viewer.until(
            lambda: client.viewer.connections > 2 and proxy.resets > resets + 1,
            LIMIT_S,
            "two lost connections",
        )
        slow_stack.set(None)

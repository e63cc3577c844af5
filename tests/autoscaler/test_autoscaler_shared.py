"""Two autoscalers that share a pool: one leads, the other takes over in the midst of a scale-out."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.autoscaler.conftest import Autoscaler
from tests.helpers.service_process import LIMIT_S, Service, connected, readiness
from tests.helpers.waiting import eventually
from turboserve import subjects
from turboserve.autoscaler.providers.local import claim, pool_id
from turboserve.bus import Bus
from turboserve.cli.embedded import NatsServer
from turboserve.contracts.leading import GetLeader, LeaderRecord, pool_leader
from turboserve.contracts.pool import OrderPool
from turboserve.contracts.requests import ListWorkers
from turboserve.contracts.workers import WorkerPhase
from turboserve.free_ports import any_free

SIZE = 5
PATIENT_S = 60.0


class Sharer:
    """One of the two processes."""

    def __init__(self, autoscaler: Autoscaler, nats: NatsServer, log: Path, broker: str) -> None:
        """`broker`: name of the broker's machine."""
        self.port = any_free()
        shared = {
            "TURBOSERVE_POOL_SHARED": "1",
            "TURBOSERVE_POOL_SCOPE": autoscaler.name,
            "TURBOSERVE_NATS_URL": nats.address.replace("127.0.0.1", broker),
            "TURBOSERVE_POOL_MIN": "1",
            "TURBOSERVE_POOL_MAX": str(SIZE),
            "TURBOSERVE_HEALTH_PORT": str(self.port),
            # Longer than a busy machine delays a leader: a living leader must keep the lead.
            "TURBOSERVE_LEADER_LEASE_S": "8",
            "TURBOSERVE_LEADER_TIMEOUT_S": "9.5",
        }
        variables = autoscaler.variables | shared
        self.service = Service("autoscaler", "turboserve.autoscaler", nats, log, **variables)
        self.service.start()

    def status(self) -> str:
        """Return the status of /readyz; empty if there is no answer."""
        return str(readiness(self.port).get("status", ""))

    async def becomes(self, status: str) -> None:
        async def is_so() -> bool:
            return await asyncio.to_thread(self.status) == status

        await eventually(is_so, LIMIT_S)


@pytest.fixture
async def pair(
    autoscaler: Autoscaler, nats_server: NatsServer, tmp_path: Path
) -> AsyncIterator[tuple[Sharer, Sharer]]:
    """The leader of a pool with one ready worker, and its standby.

    Incident: a standby that reached the broker through a proxy found no worker of the leader before, and
    started a second one in each member. Viewers stalled while these loaded.
    """
    leader = Sharer(autoscaler, nats_server, tmp_path / "one.log", "127.0.0.1")
    await leader.becomes("ready, leader")
    await autoscaler.ready(1)
    standby = Sharer(autoscaler, nats_server, tmp_path / "two.log", "localhost")
    await standby.becomes("ready, standby")
    yield leader, standby
    for one in (leader, standby):
        with suppress(ProcessLookupError, AssertionError):
            os.kill(one.service.pid, signal.SIGCONT)
        await asyncio.to_thread(one.service.end)
        print(one.service.logged())


@pytest.fixture
async def admin(nats_server: NatsServer) -> AsyncIterator[Bus]:
    bus = await connected(nats_server, "admin", PATIENT_S)
    yield bus
    await bus.close()


async def record(admin: Bus, autoscaler: Autoscaler) -> LeaderRecord:
    return await admin.call(subjects.GET_LEADER, GetLeader(name=pool_leader(autoscaler.name)))


@asynccontextmanager
async def scale_out(autoscaler: Autoscaler) -> AsyncIterator[None]:
    """Order `SIZE` workers. Until the end of the context, all but the last one are started.

    The claim to the last member stands for a launch in another process that was suspended within it.
    """
    await autoscaler.says(lambda status: status.orders == 0)
    pool = pool_id(autoscaler.name, scope=autoscaler.name)
    with claim(pool, f"{autoscaler.name}-{SIZE - 1}"):
        order = OrderPool(pool=autoscaler.name, change=("override",), override=SIZE)
        await autoscaler.bus.call(subjects.ORDER_POOL, order, deadline_s=PATIENT_S)
        await eventually(lambda: len(autoscaler.workers()) == SIZE - 1, PATIENT_S)
        yield
        assert len(autoscaler.workers()) == SIZE - 1


async def check_each_launched_once(autoscaler: Autoscaler) -> None:
    """Check that every member has one worker, the only one that it ever had."""
    await autoscaler.ready(SIZE)
    page = await autoscaler.bus.call(
        subjects.LIST_WORKERS, ListWorkers(include_gone=True), deadline_s=PATIENT_S
    )
    ours = [
        row
        for row in page.workers
        if row.pool_member is not None and row.pool_member.startswith(f"{autoscaler.name}-")
    ]
    assert Counter(row.pool_member for row in ours) == {f"{autoscaler.name}-{n}": 1 for n in range(SIZE)}
    assert [row.id for row in ours if row.phase is WorkerPhase.GONE] == []
    assert len(autoscaler.workers()) == SIZE


async def test_the_standby_finishes_the_scale_out_of_a_killed_leader(
    autoscaler: Autoscaler, pair: tuple[Sharer, Sharer], admin: Bus
) -> None:
    leader, standby = pair
    before = await record(admin, autoscaler)
    async with scale_out(autoscaler):
        leader.service.end(signal.SIGKILL)
        await standby.becomes("ready, leader")
    await check_each_launched_once(autoscaler)
    after = await record(admin, autoscaler)
    assert after.term == before.term + 1
    assert after.holder != before.holder
    assert "pool adopt" in standby.service.logged()


async def test_a_leader_that_was_suspended_starts_no_second_worker_when_it_continues(
    autoscaler: Autoscaler, pair: tuple[Sharer, Sharer], admin: Bus
) -> None:
    """Its successor leaves a claimed member out, and the one that continues starts nothing in it either."""
    leader, standby = pair
    async with scale_out(autoscaler):
        os.kill(leader.service.pid, signal.SIGSTOP)
        await standby.becomes("ready, leader")
        term = (await record(admin, autoscaler)).term
        os.kill(leader.service.pid, signal.SIGCONT)
        await leader.becomes("ready, standby")
    await check_each_launched_once(autoscaler)
    assert (await record(admin, autoscaler)).term == term
    assert standby.status() == "ready, leader"

"""Two schedulers as processes on the real broker and Postgres: one leads, and the other takes over."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from turboserve import subjects
from turboserve.bus import Bus
from turboserve.cli.embedded import Ports
from turboserve.contracts.leading import GetLeader, LeaderRecord
from turboserve.contracts.requests import SessionRef
from turboserve.contracts.sessions import Phase

Workers = Callable[..., Awaitable[Any]]
LIMIT_S = 90.0


class Instance:
    """One scheduler, with a health port."""

    def __init__(self, start: Callable[..., Any], port: int) -> None:
        self.port = port
        self.service = start(TURBOSERVE_HEALTH_PORT=str(port), TURBOSERVE_LOG_FORMAT="json")

    def status(self) -> str:
        """What /readyz calls it; empty if it does not answer at the moment."""
        with suppress(OSError):
            try:
                answer = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=2)
            except urllib.error.HTTPError as error:
                answer = error
            return str(json.loads(answer.read())["status"])
        return ""

    def metric(self, name: str) -> float:
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5).read().decode()
        return float(next(line for line in text.splitlines() if line.startswith(name)).split()[-1])

    async def becomes(self, status: str) -> None:
        deadline = asyncio.get_running_loop().time() + LIMIT_S
        while (now := await asyncio.to_thread(self.status)) != status:
            assert asyncio.get_running_loop().time() < deadline, f"it is {now!r}, not {status!r}"
            await asyncio.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.service.pid, number)


@pytest.fixture
async def pair(start_scheduler: Callable[..., Any], ports: Ports) -> tuple[Instance, Instance]:
    """The leader, and a standby that follows it."""
    leader = Instance(start_scheduler, ports.get("standby-test-1"))
    await leader.becomes("ready, leader")
    standby = Instance(start_scheduler, ports.get("standby-test-2"))
    await standby.becomes("ready, standby")
    return leader, standby


@pytest.fixture
async def admin(connect: Callable[[str], Awaitable[Bus]]) -> Bus:
    return await connect("admin")


async def row(admin: Bus) -> LeaderRecord:
    return await admin.call(subjects.GET_LEADER, GetLeader(name="scheduler"))


async def test_the_standby_takes_over_from_a_killed_leader(
    pair: tuple[Instance, Instance], workers: Workers, viewers: Any, admin: Bus
) -> None:
    leader, standby = pair
    worker = await workers(4)
    first = await viewers.create()
    await viewers.active(first)
    assert (leader.metric("turboserve_scheduler_leads"), standby.metric("turboserve_scheduler_leads")) == (
        1,
        0,
    )
    before = await row(admin)
    leader.service.end()
    second = await viewers.create()
    assert (await viewers.active(second)).worker == worker.id
    await standby.becomes("ready, leader")
    assert standby.metric("turboserve_scheduler_leads") == 1
    after = await row(admin)
    assert after.term == before.term + 1
    assert after.holder != before.holder
    # Nothing was done twice to what was there before.
    assert (await viewers.get(first)).epoch == 1


async def test_a_leader_that_stood_still_does_no_harm_when_it_wakes_up(
    pair: tuple[Instance, Instance], workers: Workers, viewers: Any, admin: Bus
) -> None:
    leader, standby = pair
    await workers(4)
    first = await viewers.create()
    await viewers.active(first)
    leader.signal(signal.SIGSTOP)
    second = await viewers.create()
    await viewers.active(second)
    await standby.becomes("ready, leader")
    term = (await row(admin)).term
    leader.signal(signal.SIGCONT)
    await leader.becomes("ready, standby")
    third = await viewers.create()
    await viewers.active(third)
    for session in (first, second, third):
        assert (await viewers.get(session)).epoch == 1
        page = await viewers.bus.call(subjects.LIST_DECISIONS, SessionRef(session=session))
        assert [decision.kind for decision in page.decisions if decision.worker] == ["place"]
    assert (await row(admin)).term == term
    assert standby.status() == "ready, leader"


async def test_worker_deaths_are_found_by_the_new_leader(
    pair: tuple[Instance, Instance], workers: Workers, viewers: Any
) -> None:
    leader, _ = pair
    first, second = await workers(4), await workers(4)
    sessions = [await viewers.create() for _ in range(4)]
    owners = {session: (await viewers.active(session)).worker for session in sessions}
    assert set(owners.values()) == {first.id, second.id}
    leader.service.end()
    await first.die()
    for session, owner in owners.items():
        if owner == first.id:
            assert (await viewers.active(session, epoch=2)).worker == second.id
        else:
            assert (await viewers.get(session)).epoch == 1


async def test_a_leader_that_is_asked_to_stop_gives_the_lead_back(
    pair: tuple[Instance, Instance], workers: Workers, viewers: Any, admin: Bus
) -> None:
    leader, standby = pair
    await workers(4)
    before = await row(admin)
    leader.signal(signal.SIGTERM)

    await standby.becomes("ready, leader")
    assert (await row(admin)).term == before.term + 1
    # Without having waited: what it has seen last is a row without a holder.
    assert "the lead was not given back" not in leader.service.logged()
    session = await viewers.create()
    assert (await viewers.active(session)).phase is Phase.ACTIVE

"""One tenant takes as much as it can: each attack on real services, while another tenant uses them.

The limits are small here, so that the attacks are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
import websockets
from websockets.asyncio.client import ClientConnection

from tests.helpers.pool_harness import Pool
from tests.helpers.service_process import connected
from turboserve import subjects
from turboserve.contracts.pool import PoolReport

GREEDY_KEY, MODEST_KEY = "key-of-the-greedy-0123456789", "key-of-the-modest-0123456789"
SLOTS = 8
"""Slots of the worker."""
SUSPENDED = 12
STREAMS = 4
PROMPTS = 30
PATIENCE_S = 60.0
LIMITS = {
    "TURBOSERVE_TENANT_SLOTS_FACTOR": "3",
    "TURBOSERVE_TENANT_SUSPENDED": str(SUSPENDED),
    "TURBOSERVE_TENANT_PROMPTS_PER_MINUTE": str(PROMPTS),
    "TURBOSERVE_SWEEP_S": "0.2",
    "TURBOSERVE_TRANSACTION_DEADLINE_S": str(PATIENCE_S),
    "TURBOSERVE_REQUEST_DEADLINE_S": str(2 * PATIENCE_S),
}
NEVER_IDLE = {"TURBOSERVE_IDLE_AFTER_S": "3600"}
"""No test watches all of its sessions, so unwatched ones must keep their slots for any duration of a test."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A deployment with limits for each tenant."""
    with Pool(tmp_path_factory.mktemp("shared"), LIMITS, NEVER_IDLE).running() as pool:
        yield pool


@pytest.fixture(scope="module")
def url(shared: Pool) -> str:
    return shared.gateway(
        "shared",
        TURBOSERVE_API_KEYS=f"{GREEDY_KEY}=greedy,{MODEST_KEY}=modest",
        TURBOSERVE_TENANT_STREAMS=str(STREAMS),
        TURBOSERVE_REQUEST_DEADLINE_S=str(PATIENCE_S),
        DRAWN_KEY=MODEST_KEY,
    )


class Tenant:
    """A tenant's client."""

    def __init__(self, url: str, key: str, client: httpx.AsyncClient) -> None:
        self.url, self.key, self.client = url, key, client

    @classmethod
    @asynccontextmanager
    async def of(cls, url: str, key: str) -> AsyncIterator[Tenant]:
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S) as client:
            one = cls(url, key, client)
            try:
                yield one
            finally:
                await one.end_all()

    async def create(self) -> httpx.Response:
        return await self.client.post("/v1/sessions", json={"prompt": "a red circle"})

    async def created(self) -> str:
        answer = await self.create()
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def until_created(self) -> str:
        """Create a session, with retries until it is admitted. Returns its id."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                answer = await self.create()
                if answer.status_code == 201:
                    return str(answer.json()["id"])
                assert answer.status_code == 429
                await asyncio.sleep(0.05)

    async def end(self, session: str) -> None:
        assert (await self.client.delete(f"/v1/sessions/{session}")).status_code == 200

    async def end_all(self) -> None:
        phases = "&".join(f"phase={phase}" for phase in ("requested", "active", "migrating", "suspended"))
        while listed := (await self.client.get(f"/v1/sessions?limit=100&{phases}")).json()["sessions"]:
            for session in listed:
                await self.end(session["id"])

    async def phase(self, session: str) -> str:
        return str((await self.client.get(f"/v1/sessions/{session}")).json()["phase"])

    async def until_active(self, session: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.phase(session) != "active":
                await asyncio.sleep(0.05)

    def stream(self, session: str) -> Any:
        address = self.url.replace("http", "ws", 1)
        return websockets.connect(
            f"{address}/v1/sessions/{session}/stream",
            additional_headers={"Authorization": f"Bearer {self.key}"},
            max_size=None,
            open_timeout=60,
            ping_interval=None,
        )


@pytest.fixture
async def greedy(url: str) -> AsyncIterator[Tenant]:
    async with Tenant.of(url, GREEDY_KEY) as tenant:
        yield tenant


@pytest.fixture
async def modest(url: str) -> AsyncIterator[Tenant]:
    async with Tenant.of(url, MODEST_KEY) as tenant:
        # The deployment knows it from its first request on.
        await tenant.end(await tenant.until_created())
        yield tenant


def refused(answer: httpx.Response, field: str, limit: int | None = None) -> None:
    assert answer.status_code == 429, answer.text
    problem = answer.json()
    assert (problem["code"], problem["field"]) == ("tenant_limit", field)
    assert int(answer.headers["retry-after"]) >= 1
    assert limit is None or problem["limit"] == limit


async def chunk(socket: ClientConnection) -> None:
    """Wait for a chunk."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            message = await socket.recv()
            if isinstance(message, str) and json.loads(message)["type"] == "chunk":
                return


async def test_one_takes_all_slots_and_another_still_plays(greedy: Tenant, modest: Tenant) -> None:
    async def grab() -> None:
        """Create as many sessions as possible, and take each slot that becomes free."""
        while True:
            await greedy.create()
            await asyncio.sleep(0.02)

    grabbing = asyncio.create_task(grab())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while (answer := await greedy.create()).status_code == 201:
                pass
        refused(answer, "tenant_slots_factor")
        ours = await modest.until_created()
        async with modest.stream(ours) as socket:
            await chunk(socket)
        # It frees its slot, and gets one again although the other tenant never stops its requests.
        await modest.end(ours)
        await modest.until_active(await modest.until_created())
    finally:
        grabbing.cancel()


async def test_a_session_that_waits_gets_the_next_slot_before_a_queue_of_the_other(
    shared: Pool, greedy: Tenant, modest: Tenant
) -> None:
    """While a pool may grow, sessions beyond the present room are admitted and wait."""
    bus = await connected(shared.nats, "autoscaler", request_deadline_s=PATIENCE_S)
    report = PoolReport(pool="shared", model="toyworld", maximum=10)

    async def keep_reporting() -> None:
        while True:
            await bus.call(subjects.REPORT_POOL, report)
            await asyncio.sleep(1.0)

    await bus.call(subjects.REPORT_POOL, report)
    reporting = asyncio.create_task(keep_reporting())
    try:
        running = [await greedy.created() for _ in range(SLOTS)]
        for session in running:
            await greedy.until_active(session)
        waiting = [await greedy.created() for _ in range(30)]
        ours = await modest.created()
        assert await modest.phase(ours) == "requested"
        await greedy.end(running[0])
        await modest.until_active(ours)
        assert {await greedy.phase(session) for session in waiting} == {"requested"}
    finally:
        reporting.cancel()
        await bus.call(subjects.REPORT_POOL, report.model_copy(update={"maximum": 0}))
        await bus.close()


async def test_create_and_pause_ends_before_the_deployment_is_full(greedy: Tenant, modest: Tenant) -> None:
    paused = 0
    async with asyncio.timeout(PATIENCE_S):
        while (answer := await greedy.create()).status_code == 201:
            session = str(answer.json()["id"])
            answer = await greedy.client.post(f"{answer.headers['location']}/pause")
            assert answer.status_code == 202
            paused += 1
            # Until then it holds its slot, and slots are limited as well.
            while await greedy.phase(session) != "suspended":
                await asyncio.sleep(0.05)
    refused(answer, "tenant_suspended", SUSPENDED)
    assert paused == SUSPENDED
    await modest.until_active(await modest.created())


async def test_streams_that_never_read_are_one_tenants_and_not_all(greedy: Tenant, modest: Tenant) -> None:
    session, ours = await greedy.created(), await modest.created()
    async with AsyncExitStack() as held:
        for number in range(STREAMS):
            if number % 2:
                request = greedy.client.stream("GET", f"/v1/sessions/{session}/events")
                assert (await held.enter_async_context(request)).status_code == 200
            else:
                socket = await held.enter_async_context(greedy.stream(session))
                assert json.loads(await socket.recv())["type"] == "hello"
        for path in ("events", "stream.mp4"):
            answer = await greedy.client.get(f"/v1/sessions/{session}/{path}")
            refused(answer, "tenant_streams", STREAMS)
        async with greedy.stream(session) as late:
            problem = json.loads(await late.recv())
            assert (problem["type"], problem["code"], problem["field"]) == (
                "error",
                "tenant_limit",
                "tenant_streams",
            )
            with pytest.raises(websockets.ConnectionClosed):
                await late.recv()
            assert late.close_code == 1013
        async with modest.stream(ours) as socket:
            await chunk(socket)


async def test_a_flood_of_prompts_is_slowed_down_for_its_tenant_alone(greedy: Tenant, modest: Tenant) -> None:
    sessions, ours = [await greedy.created() for _ in range(2)], await modest.created()

    async def prompt(tenant: Tenant, session: str) -> httpx.Response:
        return await tenant.client.post(f"/v1/sessions/{session}/prompts", json={"prompt": "x" * 2_000})

    loop = asyncio.get_running_loop()
    began = loop.time()
    answers = await asyncio.gather(*(prompt(greedy, sessions[n % 2]) for n in range(3 * PROMPTS)))
    elapsed_s = loop.time() - began
    accepted = sum(answer.status_code == 202 for answer in answers)
    # Pauses of the last minute also count: another test makes some.
    assert PROMPTS - SUSPENDED <= accepted <= PROMPTS * (1 + elapsed_s / 60.0) + 1
    rest = [answer for answer in answers if answer.status_code != 202]
    assert rest
    for answer in rest:
        refused(answer, "tenant_prompts_per_minute", PROMPTS)
    assert (await prompt(modest, ours)).status_code == 202

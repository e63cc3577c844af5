"""Requests and topics over a real broker."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tests.helpers.waiting import eventually
from tests.shared.conftest import Connect, client_of
from turboserve import logs, subjects
from turboserve.bus import Bus
from turboserve.bus.client import NoServerError
from turboserve.contracts.chunks import LatentsHeader
from turboserve.contracts.errors import (
    DeadlineError,
    InvalidInputError,
    NoCapacityError,
    NotFoundError,
    TurboServeError,
)
from turboserve.contracts.requests import Done, DrainWorker, GetLatents, SessionRef, WorkerGone
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import Playhead
from turboserve.subject_types import Caller

LATENTS = LatentsHeader(
    session="s", index=3, epoch=1, worker="wk1_a", dtype="float16", shape=(3, 2), first_latent=9
)


async def test_an_answer_and_every_kind_of_refusal(connect: Connect) -> None:
    store, caller = await connect("state-store"), await connect("autoscaler")

    async def answer(request: DrainWorker, _: Caller) -> Done:
        if request.worker == "full":
            raise NoCapacityError("full", field="worker", limit=2, retry_after_s=1.5)
        if request.worker == "bug":
            raise RuntimeError("secrets of the inside")
        return Done()

    await store.serve(subjects.DRAIN_WORKER, answer)
    await store.flush()
    assert await caller.call(subjects.DRAIN_WORKER, DrainWorker(worker="w")) == Done()
    with pytest.raises(NoCapacityError) as full:
        await caller.call(subjects.DRAIN_WORKER, DrainWorker(worker="full"))
    assert (full.value.field, full.value.limit, full.value.retry_after_s) == ("worker", 2, 1.5)
    with pytest.raises(TurboServeError) as bug:
        await caller.call(subjects.DRAIN_WORKER, DrainWorker(worker="bug"))
    assert (bug.value.code, bug.value.status) == ("internal", 500)
    assert "secrets" not in bug.value.detail
    raw = await caller.client.request(
        subjects.DRAIN_WORKER.request_subject("autoscaler"), b"not json", timeout=60
    )
    assert "invalid_input" in (raw.headers or {})["Ts-Error"]


async def test_a_client_that_gave_up_says_so(connect: Connect) -> None:
    """nats-py closes itself for good after some errors of the broker; the service must then end."""
    bus = await connect("gateway")
    assert not bus.closed.is_set()
    await client_of(bus)._process_err("'Maximum Subscriptions Exceeded'")
    async with asyncio.timeout(60):
        await bus.closed.wait()
    assert not bus.connected


async def test_no_responder_and_no_answer_are_distinguished(connect: Connect) -> None:
    store, caller = await connect("state-store"), await connect("autoscaler")
    with pytest.raises(NoServerError) as nobody:
        await caller.call(subjects.WORKER_GONE, WorkerGone(worker="w", reason=""))
    assert nobody.value.retryable
    release = asyncio.Event()

    async def slow(_: WorkerGone, __: Caller) -> Done:
        await release.wait()
        return Done()

    await store.serve(subjects.WORKER_GONE, slow)
    await store.flush()
    with pytest.raises(DeadlineError) as late:
        await caller.call(subjects.WORKER_GONE, WorkerGone(worker="w", reason=""), deadline_s=0.2)
    assert (late.value.status, late.value.limit) == (504, 0.2)
    release.set()


async def test_requests_run_side_by_side_and_are_shared_by_the_instances(connect: Connect) -> None:
    served = [0, 0]
    together = asyncio.Event()

    async def serve(bus: Bus, number: int) -> None:
        async def answer(_: DrainWorker, __: Caller) -> Done:
            served[number] += 1
            if sum(served) == 20:
                together.set()
            await together.wait()
            return Done()

        await bus.serve(subjects.DRAIN_WORKER, answer)
        await bus.flush()

    for number in range(2):
        await serve(await connect("state-store"), number)
    caller = await connect("autoscaler")
    calls = [caller.call(subjects.DRAIN_WORKER, DrainWorker(worker="w")) for _ in range(20)]
    assert await asyncio.gather(*calls) == [Done()] * 20
    assert sum(served) == 20
    assert all(served)


async def test_raw_bodies_travel_beside_their_message(connect: Connect) -> None:
    store, worker = await connect("state-store"), await connect("worker")
    data = bytes(range(256)) * 4_096

    async def answer(_: GetLatents, __: Caller) -> tuple[LatentsHeader, bytes]:
        return LATENTS, data

    kept: asyncio.Queue[tuple[LatentsHeader, bytes]] = asyncio.Queue()

    async def keep(header: LatentsHeader, body: bytes) -> None:
        await kept.put((header, body))

    await store.serve_raw(subjects.GET_LATENTS, answer)
    await store.subscribe(subjects.LATENTS, "*", keep)
    await store.flush()
    assert await worker.call_raw(subjects.GET_LATENTS, GetLatents(session="s", index=3)) == (LATENTS, data)
    for other in ("wk1_b", "wk2_a", "s"):
        await worker.publish(subjects.LATENTS, other, LATENTS, b"of another than its subject names")
    await worker.publish(subjects.LATENTS, "wk1_a", LATENTS, data)
    assert await asyncio.wait_for(kept.get(), 60) == (LATENTS, data)


async def test_a_subscription_outlives_what_it_cannot_read_and_what_its_handler_raises(
    connect: Connect,
) -> None:
    gateway, store = await connect("gateway"), await connect("state-store")
    heard: asyncio.Queue[float] = asyncio.Queue()

    async def hear(message: Playhead, _: bytes) -> None:
        if message.playhead_s == 1.0:
            raise RuntimeError("once")
        await heard.put(message.playhead_s)

    await store.subscribe(subjects.PLAYHEAD, "*", hear)
    await store.flush()
    await gateway.client.publish(subjects.PLAYHEAD.of("s"), b"\xff not json")
    for playhead_s in (1.0, 2.0):
        message = Playhead(session="s", playhead_s=playhead_s, viewers=1)
        await gateway.publish(subjects.PLAYHEAD, "s", message)
    assert await asyncio.wait_for(heard.get(), 60) == 2.0


async def test_what_the_caller_sends_wrong_names_its_field(connect: Connect) -> None:
    store, caller = await connect("state-store"), await connect("autoscaler")

    async def answer(_: DrainWorker, __: Caller) -> Done:
        return Done()

    await store.serve(subjects.DRAIN_WORKER, answer)
    await store.flush()
    wrong = DrainWorker.model_construct(worker="not an id")
    with pytest.raises(InvalidInputError) as caught:
        await caller.call(subjects.DRAIN_WORKER, wrong)
    assert caught.value.field == "worker"


async def test_a_leaders_answer_is_the_one_that_comes_though_all_instances_hear(connect: Connect) -> None:
    """A stopped former leader in a queue group would swallow every other request."""
    first, second, caller = (
        await connect("state-store"),
        await connect("state-store"),
        await connect("autoscaler"),
    )
    heard: list[str] = []

    async def silent(request: DrainWorker, _: Caller) -> Done | None:
        heard.append(f"former {request.worker}")
        return None

    async def leader(request: DrainWorker, _: Caller) -> Done | None:
        heard.append(f"leader {request.worker}")
        return Done()

    await first.serve_as_leader(subjects.DRAIN_WORKER, silent)
    await second.serve_as_leader(subjects.DRAIN_WORKER, leader)
    await first.flush()
    await second.flush()
    for number in range(10):
        assert await caller.call(subjects.DRAIN_WORKER, DrainWorker(worker=str(number))) == Done()
    await eventually(lambda: len(heard) >= 20, 60)
    assert sorted(heard) == sorted(f"{who} {number}" for who in ("former", "leader") for number in range(10))


async def test_messages_of_another_connection_are_distinguished(connect: Connect) -> None:
    """While the store was disconnected, the broker told workers that no store serves.

    The store must know of the reconnection before the first request over it.
    """
    store, caller = await connect("state-store"), await connect("autoscaler")
    connections: list[int | None] = []

    async def answer(_: WorkerGone, __: Caller) -> Done:
        connections.append(store.connection)
        return Done()

    async def ask(deadline_s: float) -> None:
        await caller.call(subjects.WORKER_GONE, WorkerGone(worker="w", reason="left"), deadline_s=deadline_s)

    await store.serve(subjects.WORKER_GONE, answer)
    await store.flush()
    async with asyncio.timeout(60):
        # Both are answered: none comes over the next connection.
        await ask(60)
        await ask(60)
        await client_of(store).force_reconnect()
        while len(connections) < 4:
            with suppress(NoServerError, DeadlineError):
                await ask(0.5)
    assert connections[:2] == [0, 0]
    assert 0 not in connections[2:]
    assert store.connection == 1


async def test_calls_and_topics_carry_the_id_of_the_clients_request(connect: Connect) -> None:
    store, caller = await connect("state-store"), await connect("gateway")
    seen: list[str | None] = []

    async def answer(_: SessionRef, __: Caller) -> SessionRecord:
        # In a task, as a handler's own work is.
        seen.append(await asyncio.create_task(current()))
        raise NotFoundError("no session", field="session")

    async def current() -> str | None:
        return logs.request_id()

    async def moved(_: Playhead, __: bytes) -> None:
        seen.append(logs.request_id())

    await store.serve(subjects.GET_SESSION, answer)
    await store.subscribe(subjects.PLAYHEAD, "*", moved)
    await store.flush()
    request = SessionRef(session="s", tenant="t")
    playhead = Playhead(session="s", gateway="g", playhead_s=1.0, viewers=1)
    for name in ("order-7", None, "no id"):
        with logs.for_request(name):
            with pytest.raises(NotFoundError):
                await caller.call(subjects.GET_SESSION, request)
            await caller.publish(subjects.PLAYHEAD, "s", playhead)
    await eventually(lambda: len(seen) == 6)
    assert sorted(seen, key=str) == [None, None, None, None, "order-7", "order-7"]
    assert logs.request_id() is None

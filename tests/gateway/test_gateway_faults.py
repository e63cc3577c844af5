"""What viewers and callers see while parts of the pool are down."""

from __future__ import annotations

import asyncio
import signal

import httpx

from tests.gateway.conftest import StartSession, Watch
from tests.helpers.pool_harness import Pool


async def test_no_room_is_429_with_a_time_to_wait(
    api: httpx.AsyncClient,
    start: StartSession,
    watch: Watch,
) -> None:
    async with asyncio.timeout(120):
        while (answer := await api.post("/v1/sessions", json={"prompt": "x"})).status_code == 201:
            # The session is watched, because an idle session gives its slot to the next.
            await watch(answer.json()["id"])
    live = (await api.get("/v1/sessions", params={"phase": ["requested", "active", "suspended"]})).json()
    for session in live["sessions"]:
        await api.delete(f"/v1/sessions/{session['id']}")
    assert answer.status_code == 429
    assert answer.json()["code"] == "no_capacity"
    assert int(answer.headers["retry-after"]) >= 1
    await start()


async def test_viewers_go_on_and_calls_are_503_while_the_state_store_is_away(
    pool: Pool,
    api: httpx.AsyncClient,
    start: StartSession,
    watch: Watch,
) -> None:
    session = await start()
    viewer = await watch(session["id"])
    await viewer.chunks(2)
    pool.stop("state-store", signal.SIGKILL)
    try:
        answer = await api.get("/v1/sessions")
        assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
        assert int(answer.headers["retry-after"]) >= 1
        await viewer.chunks(3)
        viewer.socket.transport.abort()
        # A viewer that the gateway knows may return even now.
        last = max(message["index"] for message in viewer.seen if message["type"] == "chunk")
        again = await watch(session["id"], after=last)
        assert (await again.until("chunk"))["index"] == last + 1
        unknown = await watch("ses_nobody")
        assert (await unknown.next())["code"] in ("no_server", "deadline")
        assert await unknown.closed() == 1013
    finally:
        pool.start_store()
    async with asyncio.timeout(120):
        while (await api.get("/v1/sessions")).status_code != 200:
            await asyncio.sleep(0.2)
    await again.chunks(3)
    indices = [m["index"] for one in (viewer, again) for m in one.seen if m["type"] == "chunk"]
    assert indices == list(range(len(indices)))


async def test_a_gateway_that_stops_sends_its_viewers_back(
    pool: Pool, start: StartSession, watch: Watch
) -> None:
    url: str = pool.gateway("leaving")
    session = await start()
    viewer = await watch(session["id"], url=url)
    await viewer.chunks(2)

    begun = asyncio.Event()

    async def play() -> None:
        async with (
            httpx.AsyncClient(timeout=120) as client,
            client.stream("GET", f"{url}{session['links']['video']}", params={"after": -1}) as answer,
        ):
            async for _ in answer.aiter_bytes():
                begun.set()

    playing = asyncio.create_task(play())
    beginning = asyncio.create_task(begun.wait())
    await asyncio.wait([playing, beginning], return_when=asyncio.FIRST_COMPLETED)
    assert not playing.done()
    status = await asyncio.to_thread(pool.stop, "leaving")
    assert await viewer.closed() == 1012
    await playing  # Ended in order: a cut connection would have raised.
    assert status == 0
    assert "Traceback" not in pool.log("leaving")
    last = max(message["index"] for message in viewer.seen if message["type"] == "chunk")
    elsewhere = await watch(session["id"], after=last)
    assert (await elsewhere.until("chunk"))["index"] == last + 1


async def test_a_viewer_of_a_killed_gateway_goes_on_at_another(
    pool: Pool, start: StartSession, watch: Watch
) -> None:
    url: str = pool.gateway("doomed")
    session = await start()
    viewer = await watch(session["id"], url=url)
    await viewer.chunks(3)
    await asyncio.to_thread(pool.stop, "doomed", signal.SIGKILL)
    last = max(message["index"] for message in viewer.seen if message["type"] == "chunk")
    elsewhere = await watch(session["id"], after=last)
    assert (await elsewhere.until("chunk"))["index"] == last + 1


async def test_a_worker_that_dies_costs_a_wait_and_no_chunk(
    pool: Pool, start: StartSession, watch: Watch
) -> None:
    session = await start()
    viewer = await watch(session["id"])
    await viewer.chunks(3)
    await asyncio.to_thread(pool.stop, "worker", signal.SIGKILL)
    pool.start_worker()
    first = viewer.seen[-1]["worker"]
    async with asyncio.timeout(200):
        while (await viewer.until("chunk"))["worker"] == first:
            pass
    indices = [message["index"] for message in viewer.seen if message["type"] == "chunk"]
    assert indices == list(range(len(indices)))
    epochs = [message["epoch"] for message in viewer.seen if message["type"] == "chunk"]
    assert epochs == sorted(epochs)

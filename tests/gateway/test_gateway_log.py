"""What callers and viewers see while the broker stores nothing."""

from __future__ import annotations

import asyncio

import httpx
import nats

from tests.gateway.conftest import StartSession, Watch
from tests.helpers.pool_harness import Pool
from turboserve.subjects import EVENTS


async def test_admission_is_503_while_a_stream_takes_nothing_and_viewers_play_on(
    pool: Pool,
    api: httpx.AsyncClient,
    start: StartSession,
    watch: Watch,
) -> None:
    session = await start()
    viewer = await watch(session["id"])
    await viewer.chunks(2)
    other = await start()
    assert (await api.post(f"/v1/sessions/{other['id']}/pause")).status_code == 202
    client = await nats.connect(pool.nats.url(), connect_timeout=60)
    jetstream = client.jetstream(timeout=60)
    config = (await jetstream.stream_info(EVENTS)).config
    try:
        # The stream is full: the broker refuses every event, and passes its own health check.
        await jetstream.update_stream(config.evolve(max_bytes=1))
        async with asyncio.timeout(60):
            while (answer := await api.post("/v1/sessions", json={"prompt": "x"})).status_code == 201:
                await api.delete(answer.headers["location"])
                await asyncio.sleep(0.1)
        assert (answer.status_code, answer.json()["code"]) == (503, "log_unavailable")
        # The refused append or the check of the free space, whichever came first.
        assert answer.json()["field"] in (EVENTS, "log_space")
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["retry_after_s"] > 0
        resumed = await api.post(f"/v1/sessions/{other['id']}/resume")
        assert (resumed.status_code, resumed.json()["code"]) == (503, "log_unavailable")
        assert int(resumed.headers["retry-after"]) >= 1
        async with asyncio.timeout(120):
            while (ready := await api.get("/readyz")).status_code == 200:
                await asyncio.sleep(0.1)
        assert ready.json()["checks"]["log_events"] is False
        assert ready.json()["checks"]["log_chunks"] is True
        await viewer.chunks(3)
        # Requests that promise no video are accepted; their events follow later.
        assert (await api.delete(f"/v1/sessions/{other['id']}")).status_code == 200
    finally:
        await jetstream.update_stream(config)
        await client.close()
    async with asyncio.timeout(120):
        while (await api.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.1)
        while (answer := await api.post("/v1/sessions", json={"prompt": "x"})).status_code == 503:
            await asyncio.sleep(0.1)
    assert answer.status_code in (201, 429)
    if answer.status_code == 201:
        await api.delete(answer.headers["location"])
    await viewer.chunks(2)
    indices = [message["index"] for message in viewer.seen if message["type"] == "chunk"]
    assert indices == list(range(len(indices)))

"""Two gateways in front of one pool, as behind a load balancer: one session watched through both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.gateway.conftest import StartSession, Watch
from tests.helpers.pool_harness import Pool
from tests.helpers.problem import problem
from tests.helpers.service_process import connected
from tests.helpers.waiting import eventually
from tests.helpers.whep_client import WhepViewer
from turboserve.contracts.workers import Playhead
from turboserve.subjects import PLAYHEAD


@pytest.fixture(scope="module")
def other_url(pool: Pool) -> Iterator[str]:
    url: str = pool.gateway("other")
    yield url
    pool.stop("other")


@pytest.fixture
async def words(pool: Pool) -> AsyncIterator[list[Playhead]]:
    """The gateways' playhead reports, as a worker receives them."""
    bus = await connected(pool.nats, "worker")
    heard: list[Playhead] = []

    async def hear(word: Playhead, _: bytes) -> None:
        heard.append(word)

    await bus.subscribe(PLAYHEAD, "*", hear)
    yield heard
    await bus.close()


async def test_viewers_of_one_session_through_two_gateways_are_taken_together(
    api: httpx.AsyncClient,
    start: StartSession,
    watch: Watch,
    other_url: str,
    words: list[Playhead],
) -> None:
    session = (await start())["id"]
    ahead = await watch(session)
    furthest = (await ahead.chunks(4))[-1]["start_s"]

    async def playhead_s() -> float:
        found: float = (await api.get(f"/v1/sessions/{session}")).json()["playhead_s"]
        return found

    async with asyncio.timeout(120):
        while await playhead_s() < furthest:
            await asyncio.sleep(0.05)

    # A viewer at the beginning, through another gateway, takes nothing from the first viewer.
    behind = await watch(session, url=other_url, after=-1)
    assert (await behind.until("chunk"))["index"] == 0
    gateways = {word.gateway for word in words}
    async with asyncio.timeout(120):
        while len(gateways := {word.gateway for word in words if word.viewers}) < 2:
            await asyncio.sleep(0.05)
    assert None not in gateways
    for _ in range(20):
        assert await playhead_s() >= furthest
        await asyncio.sleep(0.05)

    # A viewer without a position begins at the furthest playhead, through any gateway.
    third = await watch(session, url=other_url)
    assert (await third.until("chunk"))["start_s"] >= furthest

    for viewer in (behind, third):
        await viewer.socket.close()
    await eventually(lambda: any(word.session == session and not word.viewers for word in words), 120)
    assert await playhead_s() >= furthest
    await ahead.chunks(2)


async def test_a_webrtc_viewer_leaves_by_a_request_to_another_gateway(
    api: httpx.AsyncClient, start: StartSession, other_url: str, words: list[Playhead]
) -> None:
    stays, leaves = (await start())["id"], (await start())["id"]
    async with (
        httpx.AsyncClient(base_url=other_url, timeout=120) as other,
        WhepViewer(api, stays) as staying,
        WhepViewer(api, leaves) as leaving,
    ):
        await staying.decoded(1)
        await leaving.decoded(1)
        # Its id names the gateway as playheads do.
        named = leaving.location.rpartition("peer_")[2].partition("_")[0]
        await eventually(lambda: any(word.session == leaves for word in words))
        assert {word.gateway for word in words if word.session == leaves} == {f"gtw_{named}"}
        # A viewer of another session is not ended. Both requests travel in this order.
        wrong = staying.location.replace(stays, leaves)
        assert (await other.delete(wrong)).status_code == 204
        assert (await other.delete(leaving.location)).status_code == 204
        await leaving.closed(within_s=60)
        await staying.decoded(len(staying.frames) + 8)
        problem(await api.delete(wrong), 404, "peer_not_found", "peer")
        problem(await api.delete(leaving.location), 404, "peer_not_found", "peer")
        problem(await other.delete(f"/v1/sessions/{stays}/whep/peer_x"), 404, "peer_not_found", "peer")

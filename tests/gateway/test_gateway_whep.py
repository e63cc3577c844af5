"""Video over WebRTC from a real pool: the same pixels as MP4, controls, refusals, and how streams end."""

from __future__ import annotations

import asyncio
import io
import itertools
import re
from types import SimpleNamespace
from typing import Any

import av
import httpx
import pytest
from aiortc import RTCPeerConnection

from tests.gateway.conftest import StartSession
from tests.helpers.pool_harness import Pool
from tests.helpers.problem import problem
from tests.helpers.whep_client import SDP, WhepViewer, digest, offer_of
from turboserve.gateway.whep.incoming import EARLY_S, SILENT_S

RTP_CLOCK = 90_000
LIMIT_S = 60.0
"""Longer than anything takes on a busy machine, and shorter than a viewer's reports may be missing."""


async def until_watched(api: httpx.AsyncClient, session: str, watched: bool) -> None:
    """Wait until the gateway counts a viewer of the session, or none."""
    async with asyncio.timeout(LIMIT_S):
        while ((await api.get(f"/v1/sessions/{session}")).json()["playout"] is not None) != watched:
            await asyncio.sleep(0.1)


async def test_a_viewer_sees_the_very_pixels_of_the_mp4_at_the_rate_of_the_video(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    session = await start("a red circle")
    async with WhepViewer(api, session["id"]) as viewer:
        hello = await viewer.until("hello")
        assert (hello["session"], hello["next"], hello["role"]) == (session["id"], 0, "controller")
        await viewer.decoded(60)
        await viewer.until("chunk", index=4)
    await api.delete(f"/v1/sessions/{session['id']}")
    video = (await api.get(f"/v1/sessions/{session['id']}/stream.mp4", params={"after": -1})).content
    with av.open(io.BytesIO(video), "r") as container:
        expected = [digest(frame) for frame in container.decode(video=0)]
    seen = [pixels for _, pixels in viewer.frames]
    assert seen == expected[: len(seen)]
    chunks = [message for message in viewer.messages if message["type"] == "chunk"]
    assert [chunk["index"] for chunk in chunks] == list(range(len(chunks)))
    # Timestamps are the session's media time, as long as no chunk is late.
    times = [pts - viewer.frames[0][0] for pts, _ in viewer.frames]
    assert all(before < after for before, after in itertools.pairwise(times))
    for chunk in chunks:
        assert chunk["rtp_time"] >= round(chunk["start_s"] * RTP_CLOCK)
        first = round(chunk["start_s"] * 16)
        if first < len(times):
            assert times[first] == chunk["rtp_time"]
            steps = [after - before for before, after in itertools.pairwise(times[first : first + 9])]
            assert steps == [RTP_CLOCK // 16] * len(steps)


async def test_chunks_are_announced_although_video_comes_before_the_data_channel(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    session = await start("a red circle")
    viewer = WhepViewer(api, session["id"])
    messages = viewer.connection.sctp
    assert messages is not None
    handle = messages._handle_data

    async def late(data: bytes) -> None:
        """Lose what opens the channel, until there is video."""
        if viewer.frames:
            await handle(data)

    messages._handle_data = late  # type: ignore[method-assign]
    async with viewer:
        await viewer.until("chunk", index=2)
        assert viewer.messages[0]["type"] == "hello"
        chunks = [message["index"] for message in viewer.messages if message["type"] == "chunk"]
        assert chunks[:3] == [0, 1, 2]


async def test_a_prompt_over_the_data_channel_gets_both_receipts_and_changes_the_pixels(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    session = await start("a red circle")
    async with WhepViewer(api, session["id"]) as viewer:
        await viewer.until("chunk", index=1)
        viewer.say(type="prompt", prompt="a blue square", id="mine")
        receipt = await viewer.until("receipt", id="mine")
        applied = await viewer.until("prompt.applied", prompt_id=receipt["prompt_id"])
        chunk = await viewer.until("chunk", index=applied["chunk_index"])
        await viewer.decoded(round(chunk["start_s"] * 16) + 12)
        times = [pts - viewer.frames[0][0] for pts, _ in viewer.frames]
        first = times.index(chunk["rtp_time"])
        before, after = (
            viewer.pictures[number].to_ndarray(format="rgb24")[32, 32] for number in (first - 1, first)
        )
        assert before[0] > 150 > before[2]
        assert after[2] > 150 > after[0]
        viewer.say(type="promt")
        assert (await viewer.until("error", code="invalid_input"))["status"] == 422
        viewer.say(type="ping", id="p")
        await viewer.until("pong", id="p")


async def test_the_gateway_reports_the_playhead_of_what_it_has_sent(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    session = await start(max_lead_s=1.0)
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with WhepViewer(api, session["id"]) as viewer:
        # Nothing but playheads lets the worker go on: its lead is one second.
        chunk = await viewer.until("chunk", index=6)
        now = (await api.get(f"/v1/sessions/{session['id']}")).json()
        # Frames are sent at the rate of the video, however late this test reads how far they are.
        assert chunk["start_s"] - 1.0 < now["playhead_s"] < loop.time() - began


@pytest.mark.parametrize("way", ["delete", "close"])
async def test_a_viewer_that_leaves_is_no_viewer_any_more(
    start: StartSession, api: httpx.AsyncClient, way: str
) -> None:
    session = await start()
    async with WhepViewer(api, session["id"]) as viewer:
        await viewer.decoded(1)
        await until_watched(api, session["id"], True)
        if way == "delete":
            assert (await api.delete(viewer.location)).status_code == 204
            await viewer.closed(LIMIT_S)
    await until_watched(api, session["id"], False)
    problem(await api.delete(viewer.location), 404, "peer_not_found", "peer")


async def test_a_viewer_that_vanishes_is_found(start: StartSession, api: httpx.AsyncClient) -> None:
    session = await start()
    async with WhepViewer(api, session["id"]) as viewer:
        await viewer.decoded(1)
        await until_watched(api, session["id"], True)
        # From here on its machine is off: it neither sends nor answers, and says no goodbye.
        [transport] = {one.sender.transport.transport for one in viewer.connection.getTransceivers()}
        for protocol in transport._connection._protocols:
            protocol.transport.abort()
        await until_watched(api, session["id"], False)


async def test_a_viewer_that_reports_is_not_asked_whether_it_is_there(
    start: StartSession, api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # aiortc waits for a random time between two reports, 0.5 s to 1.5 s. Here it is always the shortest.
    monkeypatch.setattr("aiortc.rtcrtpreceiver.random", SimpleNamespace(random=lambda: 0.0))
    session = await start()
    async with WhepViewer(api, session["id"]) as viewer:
        await viewer.decoded(1)
        [transport] = {one.receiver.transport.transport for one in viewer.connection.getTransceivers()}
        [transceiver] = viewer.connection.getTransceivers()
        connection, checks = transport._connection, 0
        answer = connection.request_received

        def count(*args: Any) -> None:
            nonlocal checks
            checks += 1
            answer(*args)

        connection.request_received = count  # type: ignore[method-assign, assignment]
        send, loop = transceiver.receiver._send_rtcp, asyncio.get_running_loop()
        reported: list[float] = []

        async def noted(*args: Any) -> None:
            reported.append(loop.time())
            await send(*args)

        transceiver.receiver._send_rtcp = noted  # type: ignore[method-assign, assignment]
        async with asyncio.timeout(3 * LIMIT_S):
            while True:
                reported[:], checks = [loop.time()], 0
                await asyncio.sleep(5.0)
                gaps = [after - before for before, after in itertools.pairwise([*reported, loop.time()])]
                # On a busy machine the viewer itself may be late with a report, and is asked then.
                if len(reported) > 3 and max(gaps) < SILENT_S - 2 * EARLY_S:
                    break
        assert checks == 0

        # Its reports stop, but it answers: it stays a viewer.
        async def silent(*_: Any) -> None:
            await asyncio.sleep(0)

        transceiver.receiver._send_rtcp = silent  # type: ignore[method-assign, assignment]
        viewer.messages.clear()
        async with asyncio.timeout(LIMIT_S):
            while checks < 3:
                await asyncio.sleep(0.1)
        frames = len(viewer.frames)
        await viewer.decoded(frames + 8)


async def test_the_stream_ends_with_its_session(start: StartSession, api: httpx.AsyncClient) -> None:
    session = await start()
    async with WhepViewer(api, session["id"]) as viewer:
        await viewer.decoded(12)
        await api.delete(f"/v1/sessions/{session['id']}")
        end = await viewer.until("end")
        assert end["phase"] == "terminated"
        chunks = [message["index"] for message in viewer.messages if message["type"] == "chunk"]
        assert chunks[-1] == end["last"]
        await viewer.closed(LIMIT_S)


async def test_a_second_viewer_begins_at_the_playhead_with_a_key_frame(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    session = await start()
    async with WhepViewer(api, session["id"]) as first:
        third = (await first.until("chunk", index=3))["start_s"]
        # Chunks are announced ahead of the playhead.
        async with asyncio.timeout(LIMIT_S):
            while (await api.get(f"/v1/sessions/{session['id']}")).json()["playhead_s"] < third:
                await asyncio.sleep(0.05)
        async with WhepViewer(api, session["id"]) as second:
            await second.decoded(6)
            shared = {pixels for _, pixels in first.frames}
            await first.decoded(len(first.frames) + 40)
            shared |= {pixels for _, pixels in first.frames}
            assert (await second.until("hello"))["next"] >= 3
            assert {pixels for _, pixels in second.frames[:6]} <= shared


async def _offer(*, video: str = "video", codec: str | None = None) -> str:
    connection = RTCPeerConnection()
    connection.addTransceiver(video, direction="recvonly")
    text = await offer_of(connection)
    await connection.close()
    return text if codec is None else "\r\n".join(line for line in text.split("\r\n") if codec not in line)


async def test_offers_that_cannot_be_answered_are_refused(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    path = f"/v1/sessions/{(await start())['id']}/whep"
    good = await _offer()

    async def refused(offer: str | bytes, status: int, code: str, field: str) -> None:
        problem(await api.post(path, content=offer, headers=SDP), status, code, field)

    await refused("", 400, "invalid_offer", "body")
    await refused("hello", 400, "invalid_offer", "body")
    await refused(b"v=0\r\n\xff", 400, "invalid_offer", "body")
    await refused("v=0\r\n", 400, "invalid_offer", "m")
    await refused(good.replace("a=fingerprint", "a=x"), 400, "invalid_offer", "fingerprint")
    await refused(good.replace("a=ice-pwd", "a=x"), 400, "invalid_offer", "ice-pwd")
    await refused(re.sub(r"m=video \d+", "m=video nine", good), 400, "invalid_offer", "body")
    await refused(good + 5 * "m=video 9 UDP/TLS/RTP/SAVPF 97\r\n", 400, "invalid_offer", "m")
    await refused(await _offer(codec="H264"), 422, "unsupported_offer", "rtpmap")
    await refused(await _offer(codec="packetization-mode"), 422, "unsupported_offer", "rtpmap")
    await refused(await _offer(video="audio"), 422, "unsupported_offer", "m")
    await refused(good.replace("a=recvonly", "a=sendonly"), 422, "unsupported_offer", "m")
    await refused("v=0\r\n" + "a=x\r\n" * 20_000, 413, "body_too_large", "body")
    json = {"Content-Type": "application/json"}
    problem(await api.post(path, content=good, headers=json), 415, "unsupported_media_type", "Content-Type")
    problem(
        await api.post("/v1/sessions/ses_none/whep", content=good, headers=SDP),
        404,
        "session_not_found",
        "session",
    )
    fragment = {"Content-Type": "application/trickle-ice-sdpfrag"}
    problem(
        await api.patch(f"{path}/peer_x", content="a=x", headers=fragment),
        405,
        "method_not_allowed",
        "method",
    )
    # None of them holds a place.
    async with WhepViewer(api, path.split("/")[3]) as viewer:
        await viewer.decoded(1)


async def test_servers_for_ice_are_named_with_a_password_for_each_viewer(
    start: StartSession, pool: Pool
) -> None:
    url = pool.gateway(
        "gateway_ice",
        TURBOSERVE_ICE_SERVERS="stun:127.0.0.1:1, turn:127.0.0.1:2?transport=udp",
        TURBOSERVE_TURN_SECRET="of both",
    )
    session = (await start())["id"]
    async with httpx.AsyncClient(base_url=url, timeout=60) as api:
        answer = await api.request("OPTIONS", f"/v1/sessions/{session}/whep")
        assert (answer.status_code, answer.headers["accept-post"]) == (204, "application/sdp")
        stun, turn = answer.headers.get_list("link")
        assert stun == '<stun:127.0.0.1:1>; rel="ice-server"'
        assert turn.startswith('<turn:127.0.0.1:2?transport=udp>; rel="ice-server"; username="')
        assert 'credential-type="password"' in turn


KEY = "key-of-the-webrtc-viewer-0123456789"


async def test_a_links_holder_watches_and_does_not_control_and_ends_with_the_link(pool: Pool) -> None:
    url = pool.gateway("gateway_whep_keyed", TURBOSERVE_API_KEYS=f"{KEY}=webrtc", DRAWN_KEY=KEY)
    try:
        owner = httpx.AsyncClient(base_url=url, timeout=60, headers={"Authorization": f"Bearer {KEY}"})
        async with owner, httpx.AsyncClient(base_url=url, timeout=60) as stranger:
            session = (await owner.post("/v1/sessions", json={"prompt": "a red circle"})).json()["id"]
            link = (await owner.post(f"/v1/sessions/{session}/links", json={"role": "viewer"})).json()
            refused = await stranger.post(f"/v1/sessions/{session}/whep", content="v=0", headers=SDP)
            problem(refused, 401, "unauthorized", "Authorization")
            held = {"Authorization": f"Bearer {link['token']}"}
            ticket = (await stranger.post(f"/v1/sessions/{session}/tickets", headers=held)).json()["ticket"]
            async with WhepViewer(stranger, session, params={"ticket": ticket}) as viewer:
                assert (await viewer.until("hello"))["role"] == "viewer"
                await viewer.decoded(6)
                viewer.say(type="prompt", prompt="a blue square", id="mine")
                assert (await viewer.until("error", id="mine"))["code"] == "missing_scope"
                revoked = await owner.delete(f"/v1/sessions/{session}/links/{link['id']}")
                assert revoked.status_code == 200
                assert (await viewer.until("error", status=401))["code"] == "unauthorized"
                await viewer.closed(LIMIT_S)
            await owner.delete(f"/v1/sessions/{session}")
    finally:
        pool.stop("gateway_whep_keyed")

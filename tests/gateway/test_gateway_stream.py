"""Video over a real pool: WebSocket and plain HTTP, resuming, broken messages, slow readers."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from typing import Any

import av
import httpx
import numpy as np
import pytest
import websockets
from websockets.typing import Origin

from tests.gateway.conftest import StartSession, Watch
from tests.helpers.pool_harness import Pool
from tests.helpers.stream_protocol import client_examples


def frames(data: bytes) -> list[np.ndarray]:
    with av.open(io.BytesIO(data), "r") as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def is_red(frame: np.ndarray) -> bool:
    r, g, b = frame[32, 32].astype(int)
    return bool(r > 150 and g < 100 and b < 100)


def is_blue(frame: np.ndarray) -> bool:
    r, _, b = frame[32, 32].astype(int)
    return bool(b > 150 and r < 100)


async def test_chunks_are_whole_contiguous_and_show_what_was_asked_for(
    start: StartSession, watch: Watch
) -> None:
    session = await start("a red circle")
    viewer = await watch(session["id"])
    hello = await viewer.next()
    assert (hello["type"], hello["session"], hello["next"]) == ("hello", session["id"], 0)
    assert hello["protocol_version"] == 1
    init = await viewer.until("init")
    assert init["mime"].startswith('video/mp4; codecs="avc1.')
    chunks = await viewer.chunks(4)
    assert [chunk["index"] for chunk in chunks] == [0, 1, 2, 3]
    assert chunks[0]["start_s"] == 0
    for before, after in itertools.pairwise(chunks):
        assert after["start_s"] == pytest.approx(before["start_s"] + before["duration_s"])
    video = frames(viewer.init + b"".join(chunk["data"] for chunk in chunks))
    assert len(video) == 9 + 3 * 12
    assert all(is_red(frame) for frame in video)


async def test_a_prompt_gets_both_receipts_and_the_video_changes(start: StartSession, watch: Watch) -> None:
    viewer = await watch((await start("a red circle"))["id"])
    await viewer.chunks(2)
    await viewer.say(type="prompt", prompt="a blue square", id="mine")
    receipt = await viewer.until("receipt")
    assert (receipt["id"], receipt["control_seq"]) == ("mine", 1)
    applied = await viewer.until("prompt.applied")
    assert (applied["prompt_id"], applied["prompt"]) == (receipt["prompt_id"], "a blue square")
    while applied["chunk_index"] not in [m["index"] for m in viewer.seen if m["type"] == "chunk"]:
        await viewer.next()
    for chunk in (message for message in viewer.seen if message["type"] == "chunk"):
        changed = chunk["index"] >= applied["chunk_index"]
        assert chunk["control_seq"] == int(changed)
        seen = frames(viewer.init + chunk["data"])
        assert all(is_blue(frame) if changed else is_red(frame) for frame in seen)
    accepted = [m for m in viewer.seen if m["type"] == "prompt.accepted"]
    assert [m["prompt_id"] for m in accepted] == [receipt["prompt_id"]]


async def test_a_dropped_connection_goes_on_without_a_lost_or_repeated_chunk(
    start: StartSession, watch: Watch
) -> None:
    session = await start()
    indices: list[int] = []
    for cut in range(6):
        viewer = await watch(session["id"], **({"after": indices[-1]} if indices else {}))
        hello = await viewer.next()
        assert hello["next"] == len(indices)
        for chunk in await viewer.chunks(1 + cut % 3):
            indices.append(chunk["index"])
        viewer.socket.transport.abort()
    assert indices == list(range(len(indices)))


async def test_events_go_on_where_they_stopped(
    start: StartSession,
    watch: Watch,
    api: httpx.AsyncClient,
) -> None:
    session = await start()
    viewer = await watch(session["id"])
    await viewer.until("chunk")
    await api.post(session["links"]["prompts"], json={"prompt": "one"})
    first = await viewer.until("prompt.accepted", prompt="one")
    viewer.socket.transport.abort()
    await api.post(session["links"]["prompts"], json={"prompt": "two"})
    again = await watch(session["id"], events_after=first["sequence"])
    await again.until("prompt.accepted", prompt="two")
    assert not [m for m in again.seen if m.get("sequence", 10**9) <= first["sequence"]]


async def test_without_after_it_begins_at_the_playhead(
    start: StartSession,
    watch: Watch,
    api: httpx.AsyncClient,
) -> None:
    session = await start()
    first = await watch(session["id"])
    chunks = await first.chunks(1)
    chunks += await first.chunks(7)
    at = chunks[-1]["start_s"]
    async with asyncio.timeout(120):
        # No playhead runs ahead of the clock: it reaches the last chunk in time, however often it is
        # reported.
        while (await api.get(session["links"]["self"])).json()["playhead_s"] < at - 1e-6:
            await first.say(type="playhead", playhead_s=at)
            await asyncio.sleep(0.1)
    late = await watch(session["id"])
    hello = await late.next()
    assert hello["start_s"] <= at + 1e-6
    assert hello["start_s"] > at - chunks[-1]["duration_s"] - 1e-6
    assert (await late.until("chunk"))["index"] == hello["next"]


async def test_any_index_is_found(start: StartSession, watch: Watch) -> None:
    # Sessions share the stream, so their chunks lie apart: let two grow together.
    one, two = [await watch((await start())["id"]) for _ in range(2)]
    await asyncio.gather(one.chunks(14), two.chunks(14))
    session = one.seen[0]["session"]
    for after in (-1, 0, 5, 11, 12):
        viewer = await watch(session, after=after)
        assert (await viewer.until("chunk"))["index"] == after + 1
        await viewer.socket.close()


@pytest.mark.parametrize("after", ["last", "-2", "1.5", "", "9" * 40])
async def test_an_after_that_is_no_index_is_refused(start: StartSession, watch: Watch, after: str) -> None:
    viewer = await watch((await start())["id"], after=after)
    error = await viewer.next()
    assert (error["type"], error["code"], error["field"]) == ("error", "invalid_input", "after")
    assert await viewer.closed() == 4422


async def test_an_index_beyond_the_newest_chunk_is_gone(
    start: StartSession,
    watch: Watch,
    api: httpx.AsyncClient,
) -> None:
    session = await start()
    viewer = await watch(session["id"], after=1_000)
    error = await viewer.next()
    assert (error["code"], error["field"]) == ("chunk_gone", "after")
    assert await viewer.closed() == 4410
    # The video continues at `limit`.
    assert (await (await watch(session["id"], after=error["limit"] - 1)).next())["type"] == "hello"
    answer = await api.get(session["links"]["video"], params={"after": 1_000})
    assert (answer.status_code, answer.json()["code"]) == (410, "chunk_gone")


async def test_an_unknown_session_says_so_and_closes(watch: Watch) -> None:
    for name in ("ses_nobody", "a.b", "*"):
        viewer = await watch(name)
        assert (await viewer.next())["code"] == "session_not_found"
        assert await viewer.closed() == 4404


BROKEN: list[tuple[str | bytes, str]] = [
    ("not json", "message"),
    ("[]", "message"),
    ("null", "message"),
    ("{}", "message"),
    ('{"type": 5}', "message"),
    ('{"type": "dance"}', "message"),
    ('{"type": "prompt"}', "prompt"),
    ('{"type": "prompt", "prompt": 5}', "prompt"),
    ('{"type": "prompt", "prompt": "  "}', "prompt"),
    (json.dumps({"type": "prompt", "prompt": "x" * 2001}), "prompt"),
    ('{"type": "prompt", "prompt": "x", "extra": 1}', "extra"),
    ('{"type": "playhead"}', "playhead_s"),
    ('{"type": "playhead", "playhead_s": "1"}', "playhead_s"),
    ('{"type": "playhead", "playhead_s": -1}', "playhead_s"),
    ('{"type": "playhead", "playhead_s": NaN}', "playhead_s"),
    ('{"type": "playhead", "playhead_s": 1e400}', "playhead_s"),
    ('{"type": "ping", "id": 5}', "id"),
    ("[" * 60_000, "message"),
    ("x" * (64 * 1024 + 1), "message"),
    (b"binary", "message"),
]


NOT_JSON = ("not json", "[" * 60_000)


async def test_an_error_names_the_message_that_caused_it(start: StartSession, watch: Watch) -> None:
    viewer = await watch((await start())["id"])
    await viewer.until("hello")
    messages: list[dict[str, Any]] = [
        {"type": "prompt"},
        {"type": "dance"},
        {"type": "playhead", "playhead_s": -1, "buffered_s": "x"},
        {"type": "ping", "extra": 1},
    ]
    for number, broken in enumerate(messages):
        await viewer.say(**broken, id=f"mine-{number}")
        assert (await viewer.until("error"))["id"] == f"mine-{number}"
    for unusable in (5, "x" * 65, "\ud800"):
        await viewer.say(type="dance", id=unusable)
        assert "id" not in await viewer.until("error")
    await viewer.say(type="playhead", playhead_s=-1, buffered_s="x", id="both")
    errors = (await viewer.until("error", id="both"))["errors"]
    assert [(error["field"], error.get("limit")) for error in errors] == [
        ("playhead_s", 0),
        ("buffered_s", None),
    ]


async def test_every_message_of_the_document_is_understood(start: StartSession, watch: Watch) -> None:
    viewer = await watch((await start())["id"])
    await viewer.until("chunk")
    examples = client_examples()
    assert {"playhead", "prompt", "control", "change", "pause", "resume", "first_frame", "ping"} == set(
        examples
    )
    for kind, payload in examples.items():
        await viewer.say(**{**payload, "id": kind})
    # The gateway answers messages in their order.
    await viewer.say(type="ping", id="last")
    await viewer.until("pong", id="last")
    refused = [message for message in viewer.seen if message["type"] == "error"]
    # A pool without a free slot may refuse to resume.
    assert not [message for message in refused if message["status"] in (400, 422)]
    assert "receipt" in [message["type"] for message in viewer.seen]


async def test_broken_messages_are_answered_and_harm_nothing(start: StartSession, watch: Watch) -> None:
    viewer = await watch((await start())["id"])
    await viewer.until("chunk")
    for message, field in BROKEN:
        await viewer.socket.send(message)
        error = await viewer.until("error")
        malformed = message in NOT_JSON
        code = (400, "malformed_request") if malformed else (422, "invalid_input")
        assert (error["status"], error["code"], error["field"]) == (*code, field), message[:80]
        assert error["detail"]
        assert malformed or error["errors"][0]["field"] == field
    await viewer.say(type="ping", id="still there")
    await viewer.until("pong", id="still there")
    await viewer.chunks(2)
    indices = [m["index"] for m in viewer.seen if m["type"] == "chunk"]
    assert indices == list(range(len(indices)))


async def test_too_many_broken_messages_close_the_connection(start: StartSession, watch: Watch) -> None:
    viewer = await watch((await start())["id"])
    for _ in range(32):
        await viewer.socket.send("broken")
    assert await viewer.closed() == 1008


async def test_pages_of_other_origins_may_not_open_streams(start: StartSession, gateway_url: str) -> None:
    session = await start()
    address = gateway_url.replace("http", "ws", 1) + session["links"]["stream"]
    elsewhere = "https://elsewhere.example"
    async with websockets.connect(address, origin=Origin(elsewhere), open_timeout=120) as socket:
        assert json.loads(await socket.recv())["code"] == "forbidden_origin"
    async with websockets.connect(address, origin=Origin(gateway_url), open_timeout=120) as socket:
        assert json.loads(await socket.recv())["type"] == "hello"


async def test_pausing_stops_the_video_and_resuming_goes_on(start: StartSession, watch: Watch) -> None:
    viewer = await watch((await start())["id"])
    await viewer.chunks(2)
    await viewer.say(type="pause")
    suspended = await viewer.until("session.suspended")
    assert (suspended["phase"], suspended["activity"]) == ("suspended", "paused")
    await viewer.say(type="resume")
    placed = await viewer.until("session.placed", kind="resume")
    assert placed["epoch"] == 2
    while (await viewer.until("chunk"))["epoch"] != 2:
        pass
    indices = [m["index"] for m in viewer.seen if m["type"] == "chunk"]
    assert indices == list(range(len(indices)))


async def test_the_end_is_said_after_the_last_chunk(
    start: StartSession,
    watch: Watch,
    api: httpx.AsyncClient,
) -> None:
    session = await start()
    viewer = await watch(session["id"])
    await viewer.chunks(2)
    # The worker then waits for a playhead, so none of its chunks comes at the same time as the end.
    viewer.reports = False
    async with asyncio.timeout(120):
        while (made := (await api.get(session["links"]["self"])).json()["next_chunk"]) < 5:
            await asyncio.sleep(0.05)
    await api.delete(session["links"]["self"])
    end = await viewer.until("end")
    assert end["last"] == made - 1
    assert end["phase"] == "terminated"
    assert end["last"] == max(m["index"] for m in viewer.seen if m["type"] == "chunk")
    assert await viewer.closed() == 1000
    replay = await watch(session["id"], after=-1)
    again = await replay.until("end")
    assert again["last"] == end["last"]
    assert [m["index"] for m in replay.seen if m["type"] == "chunk"] == list(range(end["last"] + 1))


async def test_an_ended_session_is_replayed_from_its_beginning(
    start: StartSession,
    watch: Watch,
    api: httpx.AsyncClient,
) -> None:
    """Incident: a link to an ended session gave its last seconds, from the last playhead on."""
    session = await start()
    links = session["links"]
    viewer = await watch(session["id"])
    await viewer.chunks(3)
    prompt = {"prompt": "a blue square", "drop_buffer": True}
    receipt = (await api.post(f"{links['self']}/prompts", json=prompt)).json()
    await viewer.until("skip")
    await viewer.until("chunk", control_seq=receipt["control_seq"])
    # Playheads are published once per interval: the session might end before one later than 0 is.
    async with asyncio.timeout(120):
        while (await api.get(links["self"])).json()["playhead_s"] == 0:
            await viewer.until("chunk")
    assert (await api.delete(links["self"])).json()["activity"] == "ended"
    ended = await viewer.until("session.ended")
    assert (ended["phase"], ended["activity"]) == ("terminated", "ended")
    last = (await viewer.until("end"))["last"]
    row = (await api.get(links["self"])).json()
    assert row["playhead_s"] > 0
    assert row["activity"] == "ended"

    replay = await watch(session["id"])
    await replay.until("end")
    hello, *following = replay.seen
    assert (hello["next"], hello["start_s"], hello["activity"]) == (0, 0.0, "ended")
    chunks = [message for message in following if message["type"] == "chunk"]
    assert [message["index"] for message in chunks] == list(range(last + 1))
    assert "skip" not in {message["type"] for message in following}
    # The file has the same video, chunk by chunk.
    file = (await api.get(f"{links['self']}/stream.mp4")).content
    assert file.count(b"moof") == last + 1
    later = (await api.get(f"{links['self']}/stream.mp4", params={"after": last - 1})).content
    assert later.count(b"moof") == 1


async def test_an_idle_session_comes_back_for_a_viewer(
    start: StartSession,
    watch: Watch,
    api: httpx.AsyncClient,
) -> None:
    session = await start()
    viewer = await watch(session["id"])
    await viewer.chunks(1)
    await viewer.socket.close()
    async with asyncio.timeout(120):
        while (await api.get(session["links"]["self"])).json()["activity"] != "idle":
            await asyncio.sleep(0.2)
    again = await watch(session["id"])
    assert (await again.next())["activity"] == "idle"
    await again.until("session.placed", kind="resume")
    await again.until("chunk")


async def test_mp4_over_http_plays_from_the_first_byte_to_the_end(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    session = await start("a red circle")
    data = bytearray()
    async with api.stream("GET", session["links"]["video"]) as answer:
        assert answer.headers["content-type"] == "video/mp4"
        async for part in answer.aiter_bytes():
            data += part
            if len(data) > 12_000:
                break
    # Cut at any point, the complete part plays.
    assert all(is_red(frame) for frame in frames(bytes(data)))
    async with api.stream("GET", session["links"]["video"], params={"after": -1}) as answer:
        whole = bytearray()
        async for part in answer.aiter_bytes():
            if not whole:
                made = (await api.get(session["links"]["self"])).json()["next_chunk"]
                await api.delete(session["links"]["self"])
            whole += part
    video = frames(bytes(whole))
    assert len(video) >= 9
    assert len(video) == 9 + 12 * ((len(video) - 9) // 12)
    assert made == 0 or len(video) >= 9 + 12 * (made - 1)


async def test_a_plain_player_is_given_video_at_the_speed_it_plays(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    session = await start()
    async with api.stream("GET", session["links"]["video"]) as answer:
        reader = answer.aiter_bytes()
        await anext(reader)
        # Chunks beyond the lead come only because the gateway moves the playhead for a player that cannot
        # report.
        async with asyncio.timeout(120):
            while (await api.get(session["links"]["self"])).json()["next_chunk"] < 9:
                await anext(reader)


async def test_viewers_who_leave_are_noticed_while_nothing_is_sent(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    session = await start()
    await api.post(session["links"]["pause"])

    async def viewers() -> float:
        lines = (await api.get("/metrics")).text.splitlines()
        return next(
            (float(line.split()[-1]) for line in lines if line.startswith("turboserve_gateway_viewers")), 0.0
        )

    async with asyncio.timeout(60):
        # Viewers of earlier tests may still be leaving.
        while await viewers():
            await asyncio.sleep(0.05)
    async with (
        httpx.AsyncClient(base_url=api.base_url, timeout=60) as other,
        other.stream("GET", session["links"]["video"]),
        asyncio.timeout(60),
    ):
        while await viewers() != 1:
            await asyncio.sleep(0.05)
    async with asyncio.timeout(60):
        while await viewers() != 0:
            await asyncio.sleep(0.05)


async def test_a_stalled_reader_delays_no_other_reader(
    start: StartSession, gateway_url: str, watch: Watch
) -> None:
    session = await start()
    address = gateway_url.replace("http", "ws", 1) + session["links"]["stream"]
    async with websockets.connect(
        address, max_queue=1, compression=None, open_timeout=120, ping_interval=None
    ) as slow:
        await slow.recv()
        # For less than the 40 s after which the gateway disconnects a client that answers no ping.
        slow.transport.pause_reading()
        quick = await watch(session["id"])
        await quick.chunks(8)
        slow.transport.resume_reading()
        indices: list[int] = []
        while len(indices) < 8:
            message = await slow.recv()
            if isinstance(message, str) and json.loads(message)["type"] == "chunk":
                indices.append(json.loads(message)["index"])
    assert indices == list(range(8))


def test_nothing_of_this_was_logged_as_a_crash(pool: Pool, gateway_url: str) -> None:
    log = pool.log("gateway")
    assert "Traceback" not in log
    assert " error " not in log

"""A user's session through all five services, over real servers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from tests.stack.conftest import Open, ReadLog
from turboserve.bench import stream as bench
from turboserve.bench.streaming.decode import decode
from turboserve.bench.streaming.problems import ProblemError
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack
from turboserve.experiments.toyworld.judge import has_colours

pytestmark = pytest.mark.stack

FIRST_S = 120.0
"""Time limit of a first chunk: the worker may still be measuring itself."""
NEXT_S = 120.0
STILL_S = 4.0
"""Time in which a running session makes several chunks."""
PLAYING = ("active", "migrating")
"""Phases of a watched session: it may be migrating at any time."""


async def test_a_prompt_becomes_video_and_a_new_prompt_changes_it(
    open_session: Open, read_log: ReadLog
) -> None:
    viewer: Viewer = await open_session("a red circle moving left", seed=7, metadata={"who": "test"})
    created = await viewer.get()
    assert created["metadata"] == {"who": "test"}
    async with viewer.watching():
        await viewer.more_chunks(4, FIRST_S)
        switch = await viewer.submit("a blue square moving up")
        applied = await viewer.event("prompt.applied", NEXT_S, prompt_id=switch.prompt_id)
        settled = applied["chunk_index"] + 2
        await viewer.until(lambda: viewer.last >= settled + 1, NEXT_S, "video of the new prompt")
        record = await viewer.get()
        assert record["phase"] in PLAYING
        assert record["prompt"] == "a blue square moving up"
        assert record["applied_control_seq"] == switch.control_seq
        assert (await viewer.delete())["phase"] == "terminated"
        await viewer.until(lambda: viewer.ended is not None, NEXT_S, "end of the stream")

    assert viewer.ended is not None
    assert viewer.ended["last"] == viewer.last
    assert [chunk.index for chunk in viewer.chunks] == list(range(len(viewer.chunks)))
    # The receipt names the first chunk made under the prompt.
    made_under = [chunk.index for chunk in viewer.chunks if chunk.control_seq >= switch.control_seq]
    assert made_under[0] == applied["chunk_index"]

    video = decode(viewer.video())
    assert video.gaps() == []
    assert has_colours(video.between(0.0, viewer.chunks[3].end_s), ["red"])
    after = video.between(viewer.chunks[settled].start_s, viewer.chunks[settled + 1].end_s)
    assert has_colours(after, ["blue"])

    log = await read_log(viewer.session)
    assert [payload[header.init_bytes :] for header, payload in log] == [c.fragment for c in viewer.chunks]
    assert {payload[: header.init_bytes] for header, payload in log} == {viewer.chunks[0].init}
    # As shipped, a first chunk is made at the lowest configuration, also on an idle worker.
    first, lowest = log[0][0].fidelity, viewer.chunks[0].fidelity
    assert first is not None
    assert lowest is not None
    assert (first.steps, lowest["steps"], lowest["quality"]) == (1, 1, 1.0)


async def test_plain_http_carries_the_same_video(api: httpx.AsyncClient, open_session: Open) -> None:
    viewer: Viewer = await open_session("a green triangle moving right", seed=3, quality={"pin": True})

    async def download() -> bytes:
        path = f"/v1/sessions/{viewer.session}/stream.mp4?after=-1"
        async with api.stream("GET", path, timeout=FIRST_S) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "video/mp4"
            return b"".join([part async for part in answer.aiter_bytes()])

    async with viewer.watching(), asyncio.TaskGroup() as group:
        downloaded = group.create_task(download())
        await viewer.more_chunks(4, FIRST_S)
        await viewer.delete()
        await viewer.until(lambda: viewer.ended is not None, NEXT_S, "end of the stream")
    assert downloaded.result() == viewer.video()
    video = decode(downloaded.result())
    assert video.gaps() == []
    assert has_colours(video.frames, ["green"])
    assert [chunk.fidelity for chunk in viewer.chunks] == [None] * len(viewer.chunks), "the session is pinned"


async def test_pause_stops_the_video_and_resume_goes_on_where_it_stopped(open_session: Open) -> None:
    viewer: Viewer = await open_session("a yellow square moving down", seed=5)
    async with viewer.watching():
        await viewer.more_chunks(3, FIRST_S)
        assert (await viewer.pause())["activity"] == "paused"
        await viewer.event("session.suspended", NEXT_S)
        # The chunk under way may still come, on a busy machine late.
        stopped_at = await no_more_chunks(viewer)
        assert (await viewer.get())["phase"] == "suspended"
        assert viewer.last == stopped_at

        assert (await viewer.resume())["activity"] == "watching"
        await viewer.more_chunks(3, NEXT_S)
        assert (await viewer.get())["phase"] in PLAYING
    assert [chunk.index for chunk in viewer.chunks] == list(range(len(viewer.chunks)))
    assert decode(viewer.video()).gaps() == []


async def no_more_chunks(viewer: Viewer) -> int:
    """Wait until no chunk has come for `STILL_S`. Returns the index of the last chunk."""
    loop = asyncio.get_running_loop()
    last, since = viewer.last, loop.time()
    async with asyncio.timeout(FIRST_S):
        while loop.time() < since + STILL_S:
            await asyncio.sleep(0.1)
            if viewer.last != last:
                last, since = viewer.last, loop.time()
    return last


async def test_a_dropped_connection_costs_no_chunk(open_session: Open) -> None:
    viewer: Viewer = await open_session(seed=11)
    async with viewer.watching():
        await viewer.more_chunks(2, FIRST_S)
        for _ in range(3):
            await viewer.drop_connection()
            await viewer.more_chunks(2, NEXT_S)
    # A busy machine may lose a connection of its own accord.
    assert viewer.connections >= 4
    assert (viewer.player.lost, viewer.player.repeated) == (0, 0)
    assert decode(viewer.video()).gaps() == []


async def test_bad_input_is_answered_and_harms_no_session(
    stack: BackgroundStack, api: httpx.AsyncClient, open_session: Open
) -> None:
    viewer: Viewer = await open_session(seed=13)
    path = f"/v1/sessions/{viewer.session}"

    async def bad_input() -> None:
        for method, where, body, status, field in [
            ("POST", "/v1/sessions", {"prompt": ""}, 422, "prompt"),
            ("POST", "/v1/sessions", {"prompt": "x" * 2_001}, 422, "prompt"),
            ("POST", "/v1/sessions", {"prompt": 7}, 422, "prompt"),
            ("POST", "/v1/sessions", {"prompt": "a red circle", "model": "no-such"}, 422, "model"),
            ("POST", "/v1/sessions", {"prompt": "a red circle", "seed": -1}, 422, "seed"),
            ("POST", "/v1/sessions", {"prompt": "x" * 2_000_000}, 413, None),
            ("POST", f"{path}/prompts", {"prompt": " "}, 422, "prompt"),
            ("GET", "/v1/sessions/no-such", None, 404, None),
            ("POST", "/v1/sessions/no-such/pause", None, 404, None),
        ]:
            answer = await api.request(method, where, json=body)
            problem = answer.json()
            assert (answer.status_code, answer.headers["content-type"]) == (
                status,
                "application/problem+json",
            ), problem
            assert problem["status"] == status
            assert problem["title"]
            if field is not None:
                assert problem["field"] == field
        await viewer.say("this is not JSON")
        await viewer.say('{"type": "playhead", "playhead_s": "soon"}')
        await viewer.until(
            lambda: len(viewer.errors) == told + 2 or viewer.connections > connections,
            NEXT_S,
            "two error messages",
        )
        await viewer.more_chunks(2, NEXT_S)

    async with viewer.watching():
        await viewer.more_chunks(1, FIRST_S)
        for _ in range(4):
            told, connections = len(viewer.errors), viewer.connections
            await bad_input()
            # A busy machine may lose the connection of its own accord, but not each time.
            if viewer.connections == connections:
                break
        else:
            pytest.fail(f"bad input ended {viewer.connections} connections")
        assert len(viewer.errors) == told + 2
    await viewer.delete()
    with pytest.raises(ProblemError, match="409"):
        await viewer.submit("a blue circle")
    assert "Traceback" not in stack.output


async def test_a_full_pool_says_when_to_come_back(api: httpx.AsyncClient) -> None:
    # The number that fits is not known: sessions of earlier tests may still end, and unwatched ones make
    # room.
    most = 4 * (await api.get("/v1/models")).json()["models"][0]["capacity"]
    opened: list[str] = []
    try:
        async with asyncio.timeout(FIRST_S):
            while True:
                answer = await api.post("/v1/sessions", json={"prompt": "a red circle"})
                if answer.is_success:
                    opened.append(answer.json()["id"])
                    assert len(opened) <= most
                elif answer.status_code not in (503, 504):
                    break
                else:
                    # A service of a busy machine had no time for it.
                    await asyncio.sleep(0.1)
        assert answer.status_code == 429, answer.text
        assert answer.json()["limit"]
        assert int(answer.headers["retry-after"]) >= 1
    finally:
        for session in opened:
            await api.delete(f"/v1/sessions/{session}")


async def test_models_workers_and_openapi_tell_the_truth(api: httpx.AsyncClient) -> None:
    # On a busy machine a worker may just have been replaced.
    models: list[tuple[str, int]] = []
    phases: list[str] = []
    deadline_s = time.monotonic() + FIRST_S
    while (models, phases) != ([("toyworld", 2)], ["ready", "ready"]):
        assert time.monotonic() < deadline_s, (models, phases)
        found = (await api.get("/v1/models")).json()["models"]
        models = [(model["id"], model["workers"]) for model in found]
        phases = [worker["phase"] for worker in (await api.get("/v1/workers")).json()["workers"]]
        await asyncio.sleep(0.1)
    assert "/v1/sessions/{session}/prompts" in (await api.get("/openapi.json")).json()["paths"]
    page = await api.get("/")
    assert page.headers["content-type"].startswith("text/html")


async def test_bench_stream_measures_a_running_stack(stack: BackgroundStack) -> None:
    result = await bench.run(sessions=2, seconds=16.0, url=None, data=stack.data)
    assert (result["sessions"], result["chunks_lost"], result["chunks_repeated"]) == (2, 0, 0)
    assert result["prompts_applied"] == result["prompts_submitted"] == 2
    for key in ("ttfc_s", "interarrival_s", "gateway_overhead_s", "prompt_applied_s"):
        assert 0 < result[key]["p50"] <= result[key]["p95"]
    assert result["baseline"]["chunks"] > 0
    assert bench.table(result).row_count > 0
    sessions = await request_sessions(stack.url)
    assert [session["phase"] for session in sessions[:2]] == ["terminated", "terminated"]


async def request_sessions(url: str) -> list[dict[str, Any]]:
    """Return all sessions, newest first."""
    async with httpx.AsyncClient(base_url=url, timeout=FIRST_S) as client:
        sessions: list[dict[str, Any]] = (await client.get("/v1/sessions")).json()["sessions"]
        return sessions

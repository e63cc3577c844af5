"""Recordings through the gateway, of a session that a drawing worker generates."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import av
import httpx
import pytest

from tests.gateway.conftest import PATIENCE_S, FailSessionOf, StartSession, Watch
from tests.helpers.pool_harness import Pool
from tests.helpers.waiting import eventually


@pytest.fixture
async def recorded(
    recorder: Path, api: httpx.AsyncClient, start: StartSession, watch: Watch
) -> dict[str, Any]:
    """A complete recording of some chunks."""
    session = await start(record=True)
    viewer = await watch(session["id"])
    await viewer.chunks(5)
    await api.delete(f"/v1/sessions/{session['id']}")

    async def complete() -> bool:
        found = (await api.get(f"/v1/recordings/{session['recording']}")).json()
        return bool(found["state"] == "complete")

    await eventually(complete)
    found: dict[str, Any] = (await api.get(f"/v1/recordings/{session['recording']}")).json()
    return found


async def test_a_recording_is_one_video_with_ranges(
    recorded: dict[str, Any], api: httpx.AsyncClient, recorder: Path
) -> None:
    assert recorded["chunks"] >= 5
    assert (recorded["missing_chunks"], recorded["parts"], recorded["reason"]) == (0, 1, None)
    links = recorded["links"]
    whole = await api.get(links["video"])
    assert whole.status_code == 200
    assert whole.headers["content-type"] == "video/mp4"
    assert whole.headers["accept-ranges"] == "bytes"
    size, etag = len(whole.content), whole.headers["etag"]
    with av.open(io.BytesIO(whole.content), "r") as container:
        frames = list(container.decode(video=0))
        assert float((container.duration or 0) / av.time_base) == pytest.approx(
            recorded["duration_s"], abs=0.01
        )
    times = [float(frame.time or 0.0) for frame in frames]
    assert times == sorted(times)
    assert len(frames) / recorded["duration_s"] == pytest.approx(1 / (times[1] - times[0]), rel=0.01)

    head = await api.head(links["video"])
    assert (head.headers["content-length"], head.content) == (str(size), b"")
    part = await api.get(links["video"], headers={"Range": "bytes=100-299"})
    assert (part.status_code, part.content) == (206, whole.content[100:300])
    assert part.headers["content-range"] == f"bytes 100-299/{size}"
    tail = await api.get(links["video"], headers={"Range": "bytes=-50", "If-Range": etag})
    assert (tail.status_code, tail.content) == (206, whole.content[-50:])
    other = await api.get(links["video"], headers={"Range": "bytes=-50", "If-Range": '"old"'})
    assert (other.status_code, len(other.content)) == (200, size)
    known = await api.get(links["video"], headers={"If-None-Match": etag})
    assert (known.status_code, known.content) == (304, b"")
    behind = await api.get(links["video"], headers={"Range": f"bytes={size}-"})
    assert (behind.status_code, behind.json()["code"]) == (416, "range_not_satisfiable")
    assert behind.headers["content-range"] == f"bytes */{size}"
    missing = await api.get(links["video"], params={"part": 2})
    assert (missing.status_code, missing.json()["field"]) == (404, "part")

    text = (await api.get(links["playlist"])).text
    names = [line for line in text.splitlines() if line and not line.startswith("#")]
    base = links["self"]
    pieces = [(await api.get(f"{base}/{name}")).content for name in ("inits/1.mp4", *names)]
    with av.open(io.BytesIO(b"".join(pieces)), "r") as container:
        assert sum(1 for _ in container.decode(video=0)) == len(frames)
    for picture in (links["poster"], links["contact_sheet"]):
        answer = await api.get(picture)
        assert answer.headers["content-type"] == "image/jpeg"
        assert answer.content.startswith(b"\xff\xd8")

    assert (await api.delete(links["self"])).status_code == 204
    assert (await api.get(links["self"])).status_code == 404
    listed = (await api.get("/v1/recordings")).json()["recordings"]
    assert recorded["id"] not in [found["id"] for found in listed]
    await eventually(lambda: not files_in(recorder))


def files_in(top: Path) -> list[str]:
    """Return the names of all files. Unlike `Path.rglob`, skips folders that are removed meanwhile."""
    return [name for _, _, names in os.walk(top) for name in names]


async def test_recording_starts_and_stops_with_orders(
    recorder: Path, api: httpx.AsyncClient, start: StartSession, watch: Watch
) -> None:
    session = await start()
    base = f"/v1/sessions/{session['id']}"
    assert session["recording"] is None
    never = await api.delete(f"{base}/recording")
    assert (never.status_code, never.json()["code"]) == (404, "not_found")
    viewer = await watch(session["id"])
    await viewer.chunks(2)
    begun = await api.post(f"{base}/recording")
    assert (begun.status_code, begun.json()["state"]) == (202, "recording")
    assert (await api.post(f"{base}/recording")).json()["id"] == begun.json()["id"]
    assert (await api.get(base)).json()["recording"] == begun.json()["id"]
    await viewer.chunks(3)
    stopped = await api.delete(f"{base}/recording")
    assert stopped.json()["state"] in ("stopping", "complete")
    assert (await api.get(base)).json()["recording"] is None
    assert (await api.get(base)).json()["phase"] == "active"

    async def complete() -> bool:
        return bool((await api.get(begun.json()["links"]["self"])).json()["state"] == "complete")

    await eventually(complete)
    assert (await api.get(begun.json()["links"]["self"])).json()["session_failed"] is False
    listed = (await api.get("/v1/recordings", params={"session": session["id"], "limit": 1})).json()
    assert [found["id"] for found in listed["recordings"]] == [begun.json()["id"]]
    await api.delete(base)
    ended = await api.post(f"{base}/recording")
    assert (ended.status_code, ended.json()["code"]) == (409, "transition_not_allowed")


async def test_the_recording_of_a_failed_session_says_so(
    recorder: Path, api: httpx.AsyncClient, start: StartSession, fail: FailSessionOf
) -> None:
    session = await start(record=True)
    await fail(session["id"], "the model gave up")
    recording: dict[str, Any] = {}

    async def complete() -> bool:
        recording.update((await api.get(f"/v1/recordings/{session['recording']}")).json())
        return bool(recording["state"] == "complete")

    await eventually(complete)
    assert (recording["session_failed"], recording["reason"]) == (True, "the model gave up")


async def test_of_another_tenant_nothing_is_there(
    recorded: dict[str, Any], pool: Pool, api: httpx.AsyncClient
) -> None:
    key = "key-of-another-tenant"
    url = pool.gateway("recordings", TURBOSERVE_API_KEYS=f"{key}=other", DRAWN_KEY=key)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, headers=headers) as other:
        assert (await other.get("/v1/recordings")).json()["recordings"] == []
        for link in ("self", "video", "playlist", "poster"):
            assert (await other.get(recorded["links"][link])).status_code == 404, link
        assert (await other.delete(recorded["links"]["self"])).status_code == 404
        assert (await other.post(f"{recorded['links']['session']}/recording")).status_code == 404
        del other.headers["Authorization"]
        assert (await other.get("/v1/recordings")).status_code == 401
    assert (await api.get(recorded["links"]["self"])).status_code == 200


async def test_without_a_recorder_the_gateway_says_so(
    recorded: dict[str, Any], pool: Pool, api: httpx.AsyncClient, recorder: Path
) -> None:
    pool.stop("recorder")
    try:
        away = await api.get(recorded["links"]["video"])
        assert (away.status_code, away.json()["code"]) == (503, "no_server")
        assert (await api.get(recorded["links"]["self"])).status_code == 200
    finally:
        pool.start("recorder", "turboserve.recorder", {"TURBOSERVE_RECORDINGS_URL": f"file:{recorder}"})

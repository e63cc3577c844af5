"""Quality, lead and dropped buffers: over REST and the WebSocket, on a real pool."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import StartSession, Watch

QUALITY = {"floor": 0.9, "pin": False}


async def test_limits_are_set_at_creation_and_changed_live(
    api: httpx.AsyncClient, start: StartSession
) -> None:
    session = await start(quality=QUALITY, max_lead_s=0.75)
    path = session["links"]["self"]
    assert (session["quality"], session["max_lead_s"]) == (QUALITY, 0.75)
    # Its placement changes the row, too.
    async with asyncio.timeout(60):
        while not (await api.get(path)).json()["next_chunk"]:
            await asyncio.sleep(0.05)
    changed = (await api.patch(path, json={"quality": {"pin": True}})).json()
    assert (changed["quality"], changed["max_lead_s"]) == ({"floor": None, "pin": True}, 0.75)
    again = (await api.patch(path, json={"quality": {"pin": True}})).json()
    assert again["updated_at"] == changed["updated_at"]
    reset = (await api.patch(path, json={"quality": None, "max_lead_s": None})).json()
    assert (reset["quality"], reset["max_lead_s"]) == (None, None)
    assert (await api.get(path)).json()["quality"] is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "quality"),
        ({"max_lead_s": 0}, "max_lead_s"),
        ({"max_lead_s": 61}, "max_lead_s"),
        ({"max_lead_s": "1"}, "max_lead_s"),
        ({"quality": {"floor": 1.5}}, "quality.floor"),
        ({"quality": {"pin": 1}}, "quality.pin"),
        ({"quality": {"flor": 0.5}}, "quality.flor"),
        ({"prompt": "another"}, "prompt"),
    ],
)
async def test_a_bad_limit_is_named(
    api: httpx.AsyncClient, start: StartSession, body: dict[str, Any], field: str
) -> None:
    session = await start()
    answer = await api.patch(session["links"]["self"], json=body)
    assert answer.status_code == 422
    problem = answer.json()
    assert field in {problem.get("field"), *(each["field"] for each in problem.get("errors", ()))}


async def test_limits_of_an_ended_session_cannot_be_changed(
    api: httpx.AsyncClient, start: StartSession
) -> None:
    path = (await start())["links"]["self"]
    await api.delete(path)
    answer = await api.patch(path, json={"max_lead_s": 1.0})
    assert (answer.status_code, answer.json()["code"]) == (409, "transition_not_allowed")


async def test_a_short_lead_holds_the_worker_back_and_is_changed_over_the_socket(
    start: StartSession, watch: Watch
) -> None:
    viewer = await watch((await start(max_lead_s=0.01))["id"])
    viewer.reports = False
    # Chunks start at 0, 0.5625 and 1.3125 s: with one chunk of lead, two are generated for a viewer at 0.
    assert [chunk["index"] for chunk in await viewer.chunks(2)] == [0, 1]
    await viewer.say(type="playhead", playhead_s=0.0, buffered_s=1.0)
    await viewer.say(type="ping", id="p")
    await viewer.until("pong", id="p")
    assert not [each for each in viewer.seen if each["type"] == "chunk" and each["index"] > 1]
    await viewer.say(type="change", max_lead_s=3.0)
    await viewer.until("session.changed")
    assert [chunk["index"] for chunk in await viewer.chunks(2)] == [2, 3]
    await viewer.say(type="change", id="bad", quality={"floor": 2})
    problem = await viewer.until("error", id="bad")
    assert problem["field"] == "quality.floor"


async def test_chunks_and_their_session_carry_its_slack(
    api: httpx.AsyncClient, start: StartSession, watch: Watch
) -> None:
    session = await start()
    path = session["links"]["self"]
    assert (await api.get(path)).json()["playout"] is None
    viewer = await watch(session["id"])
    # It plays nothing: a viewer that plays has less left by the time at which the session is read.
    viewer.reports = False
    chunks = await viewer.chunks(4)
    for chunk in chunks:
        assert chunk["credit_s"] < chunk["slack_s"]
        assert chunk["tier"] in ("urgent", "normal", "relaxed")
    # The buffer fills up: each chunk finds more than the one before it.
    assert chunks[3]["slack_s"] > chunks[1]["slack_s"]
    playout = (await api.get(path)).json()["playout"]
    assert playout["tier"] == chunks[3]["tier"]
    assert playout["credit_s"] >= chunks[3]["credit_s"]
    assert playout["slack_s"] >= 0


@pytest.mark.parametrize("over", ["rest", "socket"])
async def test_a_prompt_that_drops_the_buffer_skips_to_the_first_chunk_that_shows_it(
    api: httpx.AsyncClient, start: StartSession, watch: Watch, over: str
) -> None:
    session = await start("a red circle")
    viewer, other = await watch(session["id"]), await watch(session["id"])
    viewer.reports = False
    # The viewer plays nothing, so that the buffer is full and no further chunk is due.
    before = [chunk["index"] for chunk in await viewer.chunks(4)]
    await viewer.say(type="playhead", playhead_s=0.0, buffered_s=2.8)
    prompt: dict[str, Any] = {"prompt": "a blue square", "drop_buffer": True}
    if over == "rest":
        assert (await api.post(session["links"]["prompts"], json=prompt)).status_code == 202
    else:
        await viewer.say(type="prompt", **prompt)
    skip = await viewer.until("skip")
    chunk = await viewer.next()
    assert (chunk["type"], chunk["index"]) == ("chunk", skip["index"])
    assert skip["index"] > before[-1]
    assert (skip["start_s"], skip["control_seq"]) == (chunk["start_s"], 1)
    assert chunk["control_seq"] == 1
    # A lead is generated from there on, although the viewer has not reported the skip yet.
    following = await viewer.chunks(2)
    assert [each["index"] for each in following] == [skip["index"] + 1, skip["index"] + 2]
    assert not [each for each in viewer.seen if each["type"] == "skip"][1:]
    assert (await other.until("skip"))["index"] == skip["index"]
    # The log keeps every chunk, and a viewer from the beginning gets each once.
    late = await watch(session["id"], after=-1)
    late.reports = False
    indexes = [each["index"] for each in await late.chunks(skip["index"] + 1)]
    assert indexes == list(range(skip["index"] + 1))

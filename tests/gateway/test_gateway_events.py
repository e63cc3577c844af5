"""Server-sent events over a real pool."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
from pydantic import SecretStr

from tests.gateway.conftest import StartSession, Watch
from tests.helpers.pool_harness import Pool
from tests.helpers.stream_protocol import check_sent
from turboserve.bus import Bus, append, last_entry
from turboserve.config import Settings
from turboserve.contracts.events import PromptApplied, session_event_from_bytes
from turboserve.subjects import EVENT, EVENTS

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


async def read(api: httpx.AsyncClient, path: str, count: int, **headers: str) -> list[dict[str, Any]]:
    """Return the first `count` events, each with its `id` and `event` beside its data, and check them."""
    found: list[dict[str, Any]] = []
    async with api.stream("GET", path, headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        event: dict[str, str] = {}
        async for line in answer.aiter_lines():
            if line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                event[name] = value
            elif "data" in event:
                data = json.loads(event["data"])
                check_sent(data)
                found.append({**data, "sse_id": event["id"], "sse_event": event["event"]})
                event = {}
                if len(found) == count:
                    return found
    return found


async def test_events_come_in_order_from_the_beginning_and_end_with_the_session(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    session = await start()
    path = session["links"]["events"]
    reading = asyncio.create_task(read(api, path, 100))
    await read(api, path, 2)  # Created and placed.
    await api.post(session["links"]["prompts"], json={"prompt": "a blue square"})
    await api.delete(session["links"]["self"])
    events = await reading
    types = [event["type"] for event in events]
    assert types[:2] == ["session.created", "session.placed"]
    assert types[-1] == "session.ended"
    assert "prompt.accepted" in types
    assert [event["sse_event"] for event in events] == types
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    assert [event["sse_id"] for event in events] == [str(event["sequence"]) for event in events]
    assert not any("tenant" in event for event in events)
    assert all(TIME.fullmatch(event["at"]) for event in events)


async def test_each_session_numbers_its_events_from_1_whatever_others_do(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    """Numbers of the shared log would show how much happens to the sessions of others."""
    one, two = await start(), await start()
    for session in (one, two):
        # On a busy machine a session that ends at once is never placed.
        await read(api, session["links"]["events"], 2)
    for session in (one, two, one, two):
        await api.post(session["links"]["prompts"], json={"prompt": "a blue square"})
    for session in (one, two):
        await api.delete(session["links"]["self"])
    for session in (one, two):
        path = session["links"]["events"]
        events = await read(api, path, 100)
        # It was created, placed, prompted twice and ended.
        assert len(events) >= 5
        assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
        # From every number on, the rest comes: nothing twice, nothing lost.
        for number in range(1, len(events)):
            rest = await read(api, f"{path}?after={number}", 100)
            assert [event["id"] for event in rest] == [event["id"] for event in events[number:]]
        assert (await api.get(path, params={"after": 2**53})).status_code == 204


async def test_of_prompts_in_a_row_only_the_one_that_is_shown_is_applied(
    start: StartSession, watch: Watch, api: httpx.AsyncClient
) -> None:
    session = await start("a red circle")
    viewer = await watch(session["id"], events_after=0)
    await viewer.chunks(1)
    # No chunk is made while it is paused, so the last prompt wins.
    await api.post(session["links"]["pause"])
    receipts = [
        (await api.post(session["links"]["prompts"], json={"prompt": prompt})).json()
        for prompt in ("a green triangle", "a yellow circle", "a blue square")
    ]
    *lost, won = [receipt["prompt_id"] for receipt in receipts]
    await api.post(session["links"]["resume"])
    applied = await viewer.until("prompt.applied")
    assert (applied["prompt_id"], applied["prompt"]) == (won, "a blue square")
    superseded = [message for message in viewer.seen if message["type"] == "prompt.superseded"]
    assert [(message["prompt_id"], message["superseded_by"]) for message in superseded] == [
        (prompt_id, won) for prompt_id in lost
    ]
    assert not any("chunk_index" in message for message in superseded)
    chunks = {m["index"]: m["control_seq"] for m in viewer.seen if m["type"] == "chunk"}
    while applied["chunk_index"] not in chunks:
        chunk = await viewer.until("chunk")
        chunks[chunk["index"]] = chunk["control_seq"]
    assert chunks[applied["chunk_index"]] == 3
    assert not {1, 2} & set(chunks.values())


async def test_a_client_goes_on_behind_its_last_event_id(start: StartSession, api: httpx.AsyncClient) -> None:
    session = await start()
    path = session["links"]["events"]
    first, second = await read(api, path, 2)
    assert (await read(api, path, 1, **{"Last-Event-ID": first["sse_id"]}))[0]["id"] == second["id"]
    assert (await read(api, f"{path}?after={first['sse_id']}", 1))[0]["id"] == second["id"]


async def test_a_client_that_reconnects_after_the_end_gets_the_end(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    session = await start()
    await api.delete(session["links"]["self"])
    events = await read(api, session["links"]["events"], 100)
    answer = await api.get(session["links"]["events"], headers={"Last-Event-ID": events[-1]["sse_id"]})
    assert answer.status_code == 204


async def test_a_last_event_id_that_is_no_number_is_refused(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    session = await start()
    answer = await api.get(session["links"]["events"], headers={"Last-Event-ID": "yesterday"})
    assert (answer.status_code, answer.json()["field"]) == (422, "last-event-id")


async def test_an_event_behind_the_end_does_not_keep_its_reader_for_ever(
    pool: Pool, start: StartSession, api: httpx.AsyncClient
) -> None:
    """The last chunk may be counted after the session has ended; its prompt is applied then."""
    session = await start()
    path = session["links"]["events"]
    await api.delete(session["links"]["self"])
    ended = (await read(api, path, 100))[-1]
    subject = EVENT.of(session["id"])
    password = pool.nats.passwords["state-store"]
    bus = await Bus.connect(
        "state-store", Settings(nats_url=pool.nats.address, nats_password=SecretStr(password))
    )
    entry = await last_entry(bus, EVENTS, subject)
    assert entry is not None
    last = session_event_from_bytes(entry.data).record
    record = last.model_copy(update={"event_sequence": last.event_sequence + 1})
    late = PromptApplied(
        id="evt_late", at=1.0, record=record, prompt_id="evt_p", control_seq=1, prompt="x", chunk_index=3
    )
    await append(bus, subject, late.to_bytes(), message_id=late.id, deadline_s=60)
    await bus.close()
    async with asyncio.timeout(120):
        [event] = await read(api, path, 100, **{"Last-Event-ID": ended["sse_id"]})
    assert (event["type"], event["chunk_index"]) == ("prompt.applied", 3)
    answer = await api.get(path, headers={"Last-Event-ID": event["sse_id"]})
    assert answer.status_code == 204


async def test_events_of_an_ended_session_are_sent_over_a_websocket_too(
    start: StartSession,
    api: httpx.AsyncClient,
    watch: Watch,
) -> None:
    session = await start()
    await api.delete(session["links"]["self"])
    events = await read(api, session["links"]["events"], 100)
    viewer = await watch(session["id"], events_after=0)
    assert await viewer.closed() == 1000
    told = [message["type"] for message in viewer.seen if "sequence" in message]
    assert told == [event["type"] for event in events]
    assert viewer.seen[-1]["type"] == "end"


async def test_a_position_that_the_session_has_not_reached_counts_as_its_newest_event(
    start: StartSession,
    api: httpx.AsyncClient,
    watch: Watch,
) -> None:
    """A follower that waited for it would not see the session end."""
    session = await start()
    viewer = await watch(session["id"], events_after=2**53)
    assert (await viewer.until("hello"))["events_after"] < 2**53
    async with api.stream("GET", session["links"]["events"], params={"after": 2**53}) as answer:
        assert answer.status_code == 200
        await api.delete(session["links"]["self"])
        lines = [line async for line in answer.aiter_lines()]
    assert "event: session.ended" in lines
    assert await viewer.closed() == 1000
    assert "session.ended" in [message["type"] for message in viewer.seen]

"""Streams of API keys in the database: what a key may do over them, and their end with the key."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import websockets
from websockets.asyncio.client import ClientConnection

from tests.helpers.problem import problem
from tests.helpers.waiting import eventually
from tests.security.access.conftest import PATIENCE_S, Connect, Create, OpenSocket, accepted
from turboserve.contracts.keys import Scope

KEY = re.compile(r"ts_[0-9a-f]{16}_[0-9a-f]{48}")
READ, WRITE = Scope.SESSIONS_READ.value, Scope.SESSIONS_WRITE.value
PROMPT = "a red circle"
Start = Callable[[str], Awaitable[dict[str, Any]]]


@pytest.fixture
async def start(create: Create, client: Connect) -> Start:
    """`await start(url)`: a new session of the keys' tenant, through the gateway at `url`."""
    key = (await create())["key"]

    async def one(url: str) -> dict[str, Any]:
        await accepted(url, key, True, client)
        answer = await client(url, key).post("/v1/sessions", json={"prompt": PROMPT})
        assert answer.status_code == 201, answer.text
        session: dict[str, Any] = answer.json()
        return {**session, "api": client(url, key)}

    return one


async def paused(session: dict[str, Any]) -> int:
    """Pause the session after its first chunk. Returns the index of its last chunk."""
    api, path = session["api"], session["links"]["self"]
    row: dict[str, Any] = {}

    async def is_so(wanted: Callable[[], bool]) -> bool:
        row.update((await api.get(path)).json())
        return wanted()

    await eventually(lambda: is_so(lambda: row["next_chunk"] > 0))
    assert (await api.post(f"{path}/pause")).status_code in (200, 202)
    await eventually(lambda: is_so(lambda: row["phase"] == "suspended"))
    last: int = row["next_chunk"] - 1
    return last


async def ended(
    url: str,
    key: str,
    session: dict[str, Any],
    client: Connect,
    socket: OpenSocket,
    end: Callable[[], Awaitable[object]],
) -> None:
    """Open every kind of stream with the key, call `end`, and check that all of them end by themselves.

    Nothing is sent over the streams in the meantime: the session is paused and the client only listens.
    """
    last = await paused(session)
    links = session["links"]
    async with (
        socket(url, session["id"], {"Authorization": f"Bearer {key}"}, after=last) as opened,
        client(url, key).stream("GET", links["events"]) as events,
        client(url, key).stream("GET", links["video"], params={"after": last}) as video,
    ):
        assert json.loads(await opened.recv())["type"] == "hello"
        assert (events.status_code, video.status_code) == (200, 200)
        await end()
        async with asyncio.timeout(PATIENCE_S):
            with suppress(websockets.ConnectionClosed):
                async for _ in opened:
                    pass
            # Only a body that is whole ends without an error here.
            async for _ in events.aiter_bytes():
                pass
            async for _ in video.aiter_bytes():
                pass
        assert opened.close_code == 4401


async def test_a_key_is_valid_at_every_gateway_until_it_is_revoked_at_one(
    urls: list[str],
    admin: httpx.AsyncClient,
    create: Create,
    client: Connect,
    socket: OpenSocket,
    start: Start,
) -> None:
    made = await create(label="both")
    key, path = made["key"], f"/v1/keys/{made['id']}"
    assert KEY.fullmatch(key)
    assert made["id"] in key
    for url in urls:
        await accepted(url, key, True, client)

    async def revoke() -> None:
        answer = await admin.delete(path)
        assert answer.json()["revoked_at"] is not None
        assert (await admin.delete(path)).json() == answer.json() == (await admin.get(path)).json()

    # Revoked at the first gateway, watched at the second one.
    await ended(urls[1], key, await start(urls[1]), client, socket, revoke)
    for url in urls:
        await accepted(url, key, False, client)
    problem(await client(urls[1], key).get("/v1/sessions"), 401, "unauthorized", "Authorization")


async def test_the_streams_of_an_expired_key_end(
    urls: list[str], create: Create, client: Connect, socket: OpenSocket, start: Start
) -> None:
    session = await start(urls[0])
    await paused(session)
    # A busy machine may open the streams for longer than the first key lasts.
    for lifetime_s in (15, 60):
        expires = datetime.now(UTC) + timedelta(seconds=lifetime_s)
        opened = False

        async def wait() -> None:
            nonlocal opened
            left_s = expires.timestamp() - time.time()  # noqa: B023
            opened = left_s > 0
            await asyncio.sleep(max(0.0, left_s))

        try:
            made = await create(expires_at=expires.isoformat())
            await accepted(urls[0], made["key"], True, client)
            await ended(urls[0], made["key"], session, client, socket, wait)
        except Exception:
            if opened or lifetime_s == 60 or datetime.now(UTC) < expires:
                raise
            continue
        break
    await accepted(urls[0], made["key"], False, client)


async def test_a_stream_needs_the_scope_to_read(
    urls: list[str], create: Create, client: Connect, socket: OpenSocket
) -> None:
    made = await create(scopes=[WRITE])
    api = client(urls[0], made["key"])

    async def created() -> Any:
        return (await api.post("/v1/sessions", json={"prompt": PROMPT})).status_code == 201

    await eventually(created)
    session = (await api.post("/v1/sessions", json={"prompt": PROMPT})).json()
    async with socket(urls[0], session["id"], {"Authorization": f"Bearer {made['key']}"}) as opened:
        message = json.loads(await opened.recv())
        assert (message["type"], message["code"], message["limit"]) == ("error", "missing_scope", READ)
        with pytest.raises(websockets.ConnectionClosed):
            await opened.recv()
        assert opened.close_code == 4403
    problem(await api.get(session["links"]["events"]), 403, "missing_scope", "scope")


async def answer_to(opened: ClientConnection, **message: Any) -> dict[str, Any]:
    """Send the message. Returns the next message of the stream with its id."""
    await opened.send(json.dumps(message))
    while True:
        raw = await opened.recv()
        if isinstance(raw, str):
            found: dict[str, Any] = json.loads(raw)
            if found.get("id") == message["id"]:
                return found


async def test_a_key_that_only_reads_changes_nothing_over_a_stream(
    urls: list[str], create: Create, client: Connect, socket: OpenSocket, start: Start
) -> None:
    session = await start(urls[0])
    key = (await create(scopes=[READ]))["key"]
    await accepted(urls[0], key, True, client)
    changes: list[dict[str, Any]] = [
        {"type": "prompt", "prompt": "a blue square"},
        {"type": "change", "max_lead_s": 9.0},
        {"type": "pause"},
        {"type": "resume"},
    ]
    async with socket(urls[0], session["id"], {"Authorization": f"Bearer {key}"}) as opened:
        for number, change in enumerate(changes):
            found = await answer_to(opened, **change, id=f"change-{number}")
            assert (found["type"], found["code"], found["field"]) == ("error", "missing_scope", "scope")
            assert (found["status"], found["limit"]) == (403, WRITE)
        # It may watch.
        await opened.send('{"type": "playhead", "playhead_s": 0.0}')
        assert (await answer_to(opened, type="ping", id="last"))["type"] == "pong"
        row = (await session["api"].get(session["links"]["self"])).json()
        assert (row["prompt"], row["control_seq"], row["activity"]) == (PROMPT, 0, "watching")
        assert row["max_lead_s"] is None
    writer = (await create(scopes=[READ, WRITE]))["key"]
    await accepted(urls[0], writer, True, client)
    async with socket(urls[0], session["id"], {"Authorization": f"Bearer {writer}"}) as opened:
        receipt = await answer_to(opened, **changes[0], id="change")
        assert (receipt["type"], receipt["control_seq"]) == ("receipt", 1)

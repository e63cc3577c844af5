"""The id of a request, and the access log."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import httpx
import pytest
import websockets

from tests.helpers.pool_harness import Pool

KEY = "ts_drawn_0123456789abcdef"
NAME = "logged"
SECRET = "a-secret-that-is-no-key-012345"


@pytest.fixture(scope="module")
def url(pool: Pool) -> str:
    """A gateway with one key, which writes an access log."""
    return pool.gateway(
        NAME,
        DRAWN_KEY=KEY,
        TURBOSERVE_API_KEYS=f"{KEY}=acme",
        TURBOSERVE_ACCESS_LOG="1",
        TURBOSERVE_LOG_FORMAT="json",
    )


async def lines(pool: Pool, request_id: str) -> list[dict[str, Any]]:
    """Return the lines of the access log about one request, once there is one."""
    async with asyncio.timeout(120):
        while True:
            # What follows the last newline is a line that is being written.
            whole = pool.log(NAME).rpartition("\n")[0]
            every = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
            found = [
                line for line in every if line["event"] == "request" and line["request_id"] == request_id
            ]
            if found:
                return found
            await asyncio.sleep(0.05)


async def test_a_response_has_the_clients_id_or_a_new_one(pool: Pool, url: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        answer = await client.get("/v1/workers", headers={"X-Request-Id": "order-7:a.b"})
        assert answer.headers.get_list("x-request-id") == ["order-7:a.b"]
        [line] = await lines(pool, "order-7:a.b")
        for given in ("", "with space", "x" * 65, "-first", "ä"):
            made = (await client.get("/v1/workers", headers={b"X-Request-Id": given.encode()})).headers
            assert made["x-request-id"].startswith("req_")
        two = [("X-Request-Id", "one"), ("X-Request-Id", "two")]
        assert (await client.get("/v1/workers", headers=two)).headers["x-request-id"].startswith("req_")
        head = await client.head("/v1/workers", headers={"X-Request-Id": "headed"})
    assert head.headers["x-request-id"] == "headed"
    [headed] = await lines(pool, "headed")
    assert (headed["method"], headed["route"], headed["status"]) == ("HEAD", "/v1/workers", 200)
    assert (line["method"], line["route"], line["status"]) == ("GET", "/v1/workers", 200)
    assert (line["tenant"], line["bytes"]) == ("acme", len(answer.content))
    assert line["key"]
    assert line["key"] != KEY
    assert line["duration_s"] >= 0
    assert line["service"] == "gateway"


async def test_a_problem_names_the_request_wherever_it_arises(pool: Pool, url: str) -> None:
    """An unknown key, an unknown path, a refused host, an invalid body and another service's refusal."""
    good = {"Authorization": f"Bearer {KEY}"}
    cases: list[tuple[str, str, dict[str, str], int, str | None]] = [
        ("GET", "/v1/sessions", {"Authorization": f"Bearer {SECRET}"}, 401, None),
        ("GET", f"/nothing/{SECRET}?access_token={SECRET}", good, 404, None),
        ("GET", "/v1/sessions", {**good, "Host": "elsewhere.example"}, 421, None),
        ("POST", "/v1/sessions", {**good, "Content-Type": "application/json"}, 422, "/v1/sessions"),
        ("GET", "/v1/sessions/ses_absent", good, 404, "/v1/sessions/{session}"),
    ]
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for number, (method, path, headers, status, route) in enumerate(cases):
            name = f"case-{number}"
            answer = await client.request(method, path, headers={**headers, "X-Request-Id": name})
            assert (answer.status_code, answer.headers["x-request-id"]) == (status, name)
            assert answer.json()["request_id"] == name
            [line] = await lines(pool, name)
            assert (line["status"], line["route"]) == (status, route)
            assert line["tenant"] == (None if status in (401, 421) or path.startswith("/nothing") else "acme")
    assert SECRET not in pool.log(NAME)
    assert KEY not in pool.log(NAME)


async def test_a_stream_has_its_line_when_it_ends_and_probes_have_none(pool: Pool, url: str) -> None:
    address = url.replace("http", "ws", 1) + f"/v1/sessions/ses_absent/stream?ticket={SECRET}"
    headers = {"X-Request-Id": "stream-1", "Authorization": f"Bearer {KEY}"}
    async with websockets.connect(address, additional_headers=headers, open_timeout=60) as socket:
        assert socket.response is not None
        assert socket.response.headers["x-request-id"] == "stream-1"
        with suppress(websockets.ConnectionClosed):
            while True:
                await socket.recv()
    [line] = await lines(pool, "stream-1")
    assert (line["method"], line["status"]) == ("WEBSOCKET", 101)
    assert line["bytes"] > 0
    assert KEY not in pool.log(NAME)
    assert SECRET not in pool.log(NAME)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await client.get("/healthz", headers={"X-Request-Id": "probe"})
        await client.get("/v1/sessions", headers={"X-Request-Id": "after"})
    await lines(pool, "after")
    assert '"probe"' not in pool.log(NAME)

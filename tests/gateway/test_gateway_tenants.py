"""API keys over a real pool: a foreign session is an unknown one; other origins; the limit of streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Viewer, Watch
from tests.helpers.pool_harness import Pool

KEY_A, KEY_B = "key-of-alice-0123456789", "key-of-bob-0123456789"
ALICE, BOB = ({"Authorization": f"Bearer {key}"} for key in (KEY_A, KEY_B))
ORIGIN = "https://friend.example"


@pytest.fixture(scope="module")
def keyed_url(pool: Pool) -> Iterator[str]:
    yield pool.gateway(
        "keyed",
        TURBOSERVE_API_KEYS=f"{KEY_A}=alice,{KEY_B}=bob",
        TURBOSERVE_CORS_ORIGINS=ORIGIN,
        TURBOSERVE_STREAM_LIMIT="1",
        TURBOSERVE_KEY_FAILURES_PER_MINUTE="1000",
        DRAWN_KEY=KEY_A,
    )
    pool.stop("keyed")


@pytest.fixture
async def keyed(keyed_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=keyed_url, timeout=120) as client:
        yield client


@pytest.fixture
async def session(keyed: httpx.AsyncClient) -> AsyncIterator[dict[str, Any]]:
    answer = await keyed.post("/v1/sessions", json={"prompt": "a red circle"}, headers=ALICE)
    assert answer.status_code == 201, answer.text
    yield answer.json()
    await keyed.delete(answer.headers["location"], headers=ALICE)


PATHS = [
    ("GET", ""),
    ("DELETE", ""),
    ("POST", "/prompts"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/decisions"),
    ("GET", "/events"),
    ("GET", "/stream.mp4"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_a_foreign_session_is_an_unknown_one(
    keyed: httpx.AsyncClient, session: dict[str, Any], method: str, path: str
) -> None:
    body = {"prompt": "mine now"} if path == "/prompts" else None

    async def ask(name: str) -> httpx.Response:
        return await keyed.request(method, f"/v1/sessions/{name}{path}", json=body, headers=BOB)

    foreign, unknown = await ask(session["id"]), await ask("ses_nobody")
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.json()["code"] == unknown.json()["code"] == "session_not_found"
    read = (await keyed.get(session["links"]["self"], headers=ALICE)).json()
    # No viewer watches it: on a slow machine it may be idle by now.
    assert read["activity"] in ("watching", "idle")
    assert (read["prompt"], read["phase"] == "terminated") == ("a red circle", False)


async def test_lists_show_a_tenants_own_sessions(keyed: httpx.AsyncClient, session: dict[str, Any]) -> None:
    async def listed(headers: dict[str, str]) -> set[str]:
        sessions = (await keyed.get("/v1/sessions", headers=headers)).json()["sessions"]
        return {one["id"] for one in sessions}

    assert session["id"] in await listed(ALICE)
    assert session["id"] not in await listed(BOB)


async def test_the_same_idempotency_key_of_two_tenants_is_two_sessions(keyed: httpx.AsyncClient) -> None:
    made = []
    for headers in (ALICE, BOB):
        answer = await keyed.post(
            "/v1/sessions", json={"prompt": "x"}, headers={**headers, "Idempotency-Key": "same"}
        )
        assert answer.status_code == 201
        made.append(answer.json()["id"])
        await keyed.delete(answer.headers["location"], headers=headers)
    assert made[0] != made[1]


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer nope"}, {"Authorization": f"Basic {KEY_A}"}]
)
@pytest.mark.parametrize(("method", "path"), [*PATHS, ("POST", "/../../sessions"), ("GET", "/../../models")])
async def test_without_a_known_key_nothing_is_revealed(
    keyed: httpx.AsyncClient, session: dict[str, Any], method: str, path: str, headers: dict[str, str]
) -> None:
    answer = await keyed.request(
        method, f"{session['links']['self']}{path}", json={"prompt": "x"}, headers=headers
    )
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["code"] == "unauthorized"


async def first_answer(
    watch: Watch, session: dict[str, Any], **options: Any
) -> tuple[Viewer, dict[str, Any]]:
    """Return a viewer and its first message, once the gateway's only place is free again.

    A stream's place is freed a moment after its client has left.
    """
    async with asyncio.timeout(120):
        while True:
            viewer = await watch(session["id"], **options)
            message = await viewer.next()
            if message.get("code") != "too_many_streams":
                return viewer, message
            await viewer.socket.close()
            await asyncio.sleep(0.05)


async def test_streams_take_the_key_in_the_header_alone(
    keyed_url: str, keyed: httpx.AsyncClient, session: dict[str, Any], watch: Watch
) -> None:
    viewer, hello = await first_answer(watch, session, url=keyed_url, key=KEY_A)
    assert hello["type"] == "hello"
    await viewer.socket.close()
    _, refusal = await first_answer(watch, session, url=keyed_url, key=KEY_B)
    assert refusal["code"] == "session_not_found"
    nobody, refusal = await first_answer(watch, session, url=keyed_url)
    assert refusal["code"] == "unauthorized"
    assert await nobody.closed() == 4401
    # A key in an address ends up in logs.
    _, refusal = await first_answer(watch, session, url=keyed_url, access_token=KEY_A)
    assert refusal["code"] == "key_in_address"
    answer = await keyed.get(f"{session['links']['self']}?access_token={KEY_A}")
    assert (answer.status_code, answer.json()["code"]) == (401, "key_in_address")


async def test_no_more_streams_than_the_limit(
    keyed_url: str, keyed: httpx.AsyncClient, session: dict[str, Any], watch: Watch
) -> None:
    _, hello = await first_answer(watch, session, url=keyed_url, key=KEY_A)
    assert hello["type"] == "hello"
    late = await watch(session["id"], url=keyed_url, key=KEY_A)
    error = await late.next()
    assert (error["code"], error["limit"]) == ("too_many_streams", 1)
    assert await late.closed() == 1013
    answer = await keyed.get(session["links"]["video"], headers=ALICE)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")


async def test_named_origins_may_call(keyed: httpx.AsyncClient) -> None:
    answer = await keyed.get("/v1/models", headers={**ALICE, "Origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    other = await keyed.get("/v1/models", headers={**ALICE, "Origin": "https://foe.example"})
    assert "access-control-allow-origin" not in other.headers


def test_no_key_is_in_the_log(pool: Pool, keyed_url: str) -> None:
    log = pool.log("keyed")
    assert KEY_A not in log
    assert "Traceback" not in log

"""Characters that cannot be stored: NUL, and halves of surrogate pairs.

Postgres refuses NUL, and the halves are no UTF-8. Wherever a client can put them, the answer names the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import StartSession, Watch

BROKEN = ("\0", "a\0b", "\ud800", "a\udfffb", "\udc00\ud800")


def broken_bodies(body: Any) -> Iterator[tuple[str, Any]]:
    """Yield `body` with each of its strings replaced in turn, and the path of the string."""

    def walk(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
        if isinstance(value, str):
            yield path
        for key, item in (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        ):
            yield from walk(item, (*path, key))

    for path in walk(body, ()):
        for text in BROKEN:
            copy = deepcopy(body)
            place = copy
            for part in path[:-1]:
                place = place[part]
            place[path[-1]] = text
            yield ".".join(map(str, path)), copy


SESSION = {"prompt": "x", "model": "toyworld", "metadata": {"k": "v"}}


async def refused(api: Any, method: str, path: str, body: Any, field: str) -> None:
    headers = {"Content-Type": "application/json"}
    # The characters are escaped, as JSON allows.
    answer = await api.request(method, path, content=json.dumps(body).encode(), headers=headers)
    assert answer.status_code == 422, (body, answer.text)
    problem = answer.json()
    assert (problem["code"], problem["field"]) == ("invalid_input", field), (body, problem)


async def test_every_text_of_a_session_is_checked(api: httpx.AsyncClient, start: StartSession) -> None:
    for field, body in broken_bodies(SESSION):
        await refused(api, "POST", "/v1/sessions", body, field)
    for text in BROKEN:
        await refused(api, "POST", "/v1/sessions", {"prompt": "x", "metadata": {text: "v"}}, "metadata")
    session = await start()
    for field, body in broken_bodies({"prompt": "x"}):
        await refused(api, "POST", session["links"]["prompts"], body, field)
    for field, body in broken_bodies({"worker": "wrk_x"}):
        await refused(api, "POST", session["links"]["migrate"], body, field)


async def test_unknown_members_with_such_names_are_refused_too(api: httpx.AsyncClient) -> None:
    for text in BROKEN:
        content = json.dumps({"prompt": "x", text: "y"}).encode()
        answer = await api.post("/v1/sessions", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422, answer.text
        assert answer.json()["code"] == "invalid_input"


@pytest.mark.parametrize("text", ["%00", "a%00b", "%ed%a0%80", "%ff"])
async def test_paths_and_queries_are_checked(api: httpx.AsyncClient, text: str) -> None:
    for path in ("", "/prompts", "/pause", "/events", "/stream.mp4", "/decisions"):
        method = "POST" if path in ("/prompts", "/pause") else "GET"
        answer = await api.request(method, f"/v1/sessions/ses_{text}{path}", json={"prompt": "x"})
        assert answer.status_code in (404, 422), (path, answer.text)
    for query in (
        "sessions?after=",
        "sessions?phase=",
        "cost?session=",
        "workers?include_gone=",
    ):
        answer = await api.get(f"/v1/{query}{text}")
        assert answer.status_code == 422, (query, answer.text)


async def test_a_socket_names_the_field_and_goes_on(start: StartSession, watch: Watch) -> None:
    viewer = await watch((await start())["id"])
    for text in BROKEN:
        for field, message in (
            ("prompt", {"type": "prompt", "prompt": text}),
            ("id", {"type": "prompt", "prompt": "x", "id": text}),
        ):
            await viewer.say(**message)
            error = await viewer.until("error")
            assert (error["code"], error["field"]) == ("invalid_input", field)
    await viewer.say(type="ping", id="still here")
    await viewer.until("pong", id="still here")

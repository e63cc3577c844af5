"""Limits of an API key at real gateways: what exceeds them, and that a change holds."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from typing import Any

import httpx
import pytest
import websockets
from typer.testing import CliRunner

from tests.helpers.problem import problem
from tests.helpers.waiting import eventually
from tests.security.access.conftest import ADMIN, Connect, Create, OpenSocket, accepted
from turboserve.cli.main import app

PROMPT = "a red circle"


async def owner(
    create: Create, client: Connect, urls: list[str], **limits: Any
) -> tuple[dict[str, Any], httpx.AsyncClient]:
    made = await create(tenant="limited", limits=limits)
    for url in urls:
        await accepted(url, made["key"], True, client)
    return made, client(urls[0], made["key"])


async def test_a_creation_over_a_limit_is_refused_and_answers_show_what_is_left(
    admin: httpx.AsyncClient, urls: list[str], create: Create, client: Connect
) -> None:
    for _ in range(5):
        made, ours = await owner(
            create, client, urls, sessions=1, creations_per_minute=2, prompts_per_minute=5
        )
        began = time.monotonic()
        first = await ours.post("/v1/sessions", json={"prompt": PROMPT})
        path = first.json()["links"]["self"]
        prompted = await ours.post(f"{path}/prompts", json={"prompt": "a blue square"})
        second = await ours.post("/v1/sessions", json={"prompt": PROMPT})
        ended = await ours.delete(path)
        again = await ours.post("/v1/sessions", json={"prompt": PROMPT})
        await ours.delete(again.json()["links"]["self"])
        third = await ours.post("/v1/sessions", json={"prompt": PROMPT})
        # After half a minute, one more session may be created.
        if time.monotonic() < began + 29.0:
            break
    assert {name: value for name, value in made["limits"].items() if value is not None} == {
        "sessions": 1,
        "creations_per_minute": 2,
        "prompts_per_minute": 5,
    }
    assert first.status_code == 201
    assert '"key_creations_per_minute";q=2;w=60' in first.headers["ratelimit-policy"]
    assert '"key_creations_per_minute";r=1;t=30' in first.headers["ratelimit"]
    assert '"key_prompts_per_minute";r=4;t=12' in prompted.headers["ratelimit"]
    problem(second, 429, "key_quota", "key_sessions")
    assert int(second.headers["retry-after"]) > 0
    # What was refused has taken nothing from the rate.
    assert ended.status_code == 200
    assert '"key_creations_per_minute";r=0' in again.headers["ratelimit"]
    problem(third, 429, "key_quota", "key_creations_per_minute")
    assert third.headers["ratelimit-policy"] == '"key_creations_per_minute";q=2;w=60'
    assert third.headers["ratelimit"].startswith('"key_creations_per_minute";r=0;t=')
    audited = (await admin.get("/v1/audit", params={"operation": "create_key", "limit": 1})).json()
    assert json.loads(audited["entries"][0]["change"])["limits"]["sessions"] == 1


async def test_a_change_of_streams_holds_at_every_gateway(
    admin: httpx.AsyncClient, urls: list[str], create: Create, client: Connect, socket: OpenSocket
) -> None:
    made, ours = await owner(create, client, urls)
    answer = await ours.post("/v1/sessions", json={"prompt": PROMPT})
    session, path = answer.json()["id"], answer.json()["links"]["self"]
    header = {"Authorization": f"Bearer {made['key']}"}
    async with socket(urls[0], session, header) as one, socket(urls[1], session, header) as two:
        for opened in (one, two):
            assert json.loads(await opened.recv())["type"] == "hello"
        assert (
            await admin.patch(f"/v1/keys/{made['id']}", json={"limits": {"streams": 1}})
        ).status_code == 200

        async def refused(url: str) -> bool:
            async with socket(url, session, header) as third:
                while True:
                    try:
                        message = await third.recv()
                    except websockets.ConnectionClosed as closed:
                        return closed.rcvd is not None and closed.rcvd.code == 1013
                    if isinstance(message, str) and json.loads(message)["type"] == "hello":
                        return False

        for url in urls:
            await eventually(partial(refused, url))
        # Streams that are open go on.
        await asyncio.gather(one.ping(), two.ping())
    assert (await ours.get(path)).status_code == 200
    await ours.delete(path)


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"slots": 0}, "limits.slots"),
        ({"weight": 1_000}, "limits.weight"),
        ({"streams": 1.5}, "limits.streams"),
        ({"requests": 3}, "limits.requests"),
        ({"gpu_seconds_per_day": "1"}, "limits.gpu_seconds_per_day"),
    ],
)
async def test_a_limit_that_is_none_is_refused(
    admin: httpx.AsyncClient, create: Create, limits: dict[str, Any], field: str
) -> None:
    made = await create(tenant="limited")
    answer = await admin.patch(f"/v1/keys/{made['id']}", json={"limits": limits})
    problem(answer, 422, "invalid_input", field)
    new = {"tenant": "limited", "scopes": ["sessions:read"], "limits": limits}
    problem(await admin.post("/v1/keys", json=new), 422, "invalid_input", field)


async def test_only_admins_change_limits(urls: list[str], create: Create, client: Connect) -> None:
    made, ours = await owner(create, client, urls, slots=1)
    body = {"limits": {"slots": None}}
    problem(await ours.patch(f"/v1/keys/{made['id']}", json=body), 403, "missing_scope", "scope")
    keyless = await client(urls[0]).patch(f"/v1/keys/{made['id']}", json=body)
    problem(keyless, 401, "unauthorized", "Authorization")


async def test_the_command_changes_limits(urls: list[str], admin: httpx.AsyncClient) -> None:
    access = ["--url", urls[0], "--key", ADMIN, "--json"]

    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["keys", *words], env={"COLUMNS": "300"})

    words = ["add", "limited", "--limit", "gpu-seconds-per-day=3600", "--limit", "weight=0.5", *access]
    made = json.loads((await asyncio.to_thread(run, *words)).stdout)
    assert (made["limits"]["gpu_seconds_per_day"], made["limits"]["weight"]) == (3600.0, 0.5)
    done = await asyncio.to_thread(run, "limit", made["id"], "weight=none", "slots=4", *access)
    assert done.exit_code == 0, done.output
    limits = (await admin.get(f"/v1/keys/{made['id']}")).json()["limits"]
    assert (limits["weight"], limits["slots"], limits["gpu_seconds_per_day"]) == (None, 4, 3600.0)
    for wrong in ("slots", "places=3", "slots=many"):
        failed = await asyncio.to_thread(run, "limit", made["id"], wrong, *access)
        assert failed.exit_code == 1
    shown = await asyncio.to_thread(run, "list", *access[:-1])
    assert "slots=4" in shown.output

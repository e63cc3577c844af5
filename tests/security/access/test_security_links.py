"""Links to one session and stream tickets, over two gateways: what each role may do, and until when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import httpx
import pytest
import websockets

from tests.helpers.pool_harness import Pool
from tests.helpers.problem import problem
from tests.helpers.waiting import eventually
from tests.security.access.conftest import PATIENCE_S, Connect, Create, OpenSocket, accepted

PROMPT = "a red circle"


@dataclass
class Shared:
    """A session with a client of its tenant's key at each gateway."""

    id: str
    path: str
    owners: list[httpx.AsyncClient]
    key: dict[str, Any]

    async def link(self, **fields: Any) -> dict[str, Any]:
        answer = await self.owners[0].post(f"{self.path}/links", json=fields)
        assert answer.status_code == 201, answer.text
        assert answer.headers["cache-control"] == "no-store"
        made: dict[str, Any] = answer.json()
        return made

    async def revoke(self, link: dict[str, Any]) -> None:
        answer = await self.owners[1].delete(f"{self.path}/links/{link['id']}")
        assert answer.status_code == 200, answer.text


@pytest.fixture
async def shared(urls: list[str], create: Create, client: Connect) -> AsyncIterator[Shared]:
    key = await create(tenant="sharing")
    owners = [client(url, key["key"]) for url in urls]
    for url in urls:
        await accepted(url, key["key"], True, client)
    session = (
        await owners[0].post("/v1/sessions", json={"prompt": PROMPT, "metadata": {"user": "u-17"}})
    ).json()
    yield Shared(session["id"], session["links"]["self"], owners, key)
    await owners[0].delete(session["links"]["self"])


async def first_message(opened: Any) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(await opened.recv())
    return message


async def test_a_viewer_watches_and_changes_nothing(
    shared: Shared, urls: list[str], client: Connect, socket: OpenSocket
) -> None:
    link = await shared.link(label="review")
    assert (link["role"], link["session"], link["created_by"]) == ("viewer", shared.id, shared.key["id"])
    # At once, and at the other gateway.
    viewer = client(urls[1], link["token"])
    session = (await viewer.get(shared.path)).json()
    assert session["prompt"] == PROMPT
    # The metadata is its tenant's.
    assert session["metadata"] == {}
    body = {"prompt": "a blue square"}
    for verb, path, sent in (
        ("POST", "/prompts", body),
        ("PATCH", "", {"max_lead_s": 1.0}),
        ("POST", "/pause", None),
        ("POST", "/resume", None),
    ):
        found = problem(await viewer.request(verb, shared.path + path, json=sent), 403, "link_role", "role")
        assert found["limit"] == "controller"
    for verb, path, sent in (
        ("DELETE", "", None),
        ("POST", "/migrate", {}),
        ("GET", "/decisions", None),
        ("GET", "/links", None),
        ("POST", "/links", {}),
        ("DELETE", f"/links/{link['id']}", None),
    ):
        problem(await viewer.request(verb, shared.path + path, json=sent), 403, "link_role", "role")
    for path in ("/v1/sessions", "/v1/models", "/v1/workers", "/v1/pools", "/v1/cost", "/v1/keys"):
        problem(await viewer.get(path), 403, "link_role", "role")
    problem(await viewer.post("/v1/sessions", json=body), 403, "link_role", "role")
    problem(
        await viewer.post(f"{shared.path}/tickets", json={"role": "controller"}), 403, "link_role", "role"
    )
    ticket = (await viewer.post(f"{shared.path}/tickets")).json()
    assert ticket["role"] == "viewer"
    async with socket(urls[0], shared.id, ticket=ticket["ticket"]) as opened:
        assert (await first_message(opened))["role"] == "viewer"
        await opened.send(json.dumps({"type": "prompt", "prompt": "a blue square", "id": "mine"}))
        while (message := await first_or_skip(opened))["type"] != "error":
            pass
        assert (message["id"], message["code"]) == ("mine", "missing_scope")
    assert (await shared.owners[0].get(shared.path)).json()["prompt"] == PROMPT


async def first_or_skip(opened: Any) -> dict[str, Any]:
    """Return the next JSON message."""
    while isinstance(raw := await opened.recv(), bytes):
        pass
    message: dict[str, Any] = json.loads(raw)
    return message


async def test_a_controller_prompts_and_pauses_and_ends_nothing(
    shared: Shared, urls: list[str], client: Connect, socket: OpenSocket
) -> None:
    link = await shared.link(role="controller")
    controller = client(urls[1], link["token"])
    assert (
        await controller.post(f"{shared.path}/prompts", json={"prompt": "a blue square"})
    ).status_code == 202
    changed = await controller.patch(shared.path, json={"max_lead_s": 2.0})
    assert (changed.status_code, changed.json()["metadata"]) == (200, {})
    for action in ("pause", "resume"):
        answer = await controller.post(f"{shared.path}/{action}")
        assert (answer.status_code, answer.json()["metadata"]) == (202, {})
    problem(await controller.delete(shared.path), 403, "link_role", "role")
    problem(await controller.post(f"{shared.path}/links", json={}), 403, "link_role", "role")
    # A controller passes on less than it has.
    ticket = (await controller.post(f"{shared.path}/tickets", json={"role": "viewer"})).json()["ticket"]
    async with socket(urls[0], shared.id, ticket=ticket) as opened:
        assert (await first_message(opened))["role"] == "viewer"


async def test_a_link_opens_the_recordings_of_its_session(
    shared: Shared, admin: httpx.AsyncClient, urls: list[str], client: Connect
) -> None:
    other = (await shared.owners[0].post("/v1/sessions", json={"prompt": PROMPT, "record": True})).json()
    link = await shared.link(role="controller")
    controller = client(urls[0], link["token"])
    viewer = client(urls[1], (await shared.link())["token"])
    path = f"{shared.path}/recording"
    problem(await viewer.post(path), 403, "link_role", "role")
    begun = await controller.post(path)
    assert (begun.status_code, begun.json()["session"]) == (202, shared.id)
    own = begun.json()["links"]
    for holder in (viewer, controller):
        for query in ({}, {"session": shared.id}):
            listed = (await holder.get("/v1/recordings", params=query)).json()["recordings"]
            assert [one["id"] for one in listed] == [begun.json()["id"]]
        assert (await holder.get(own["self"])).json() == begun.json()
        # The request passes, and no recorder runs here.
        problem(await holder.get(own["video"]), 503, "no_server")
        # Another session's recordings are as ones that do not exist.
        foreign, none = f"/v1/recordings/{other['recording']}", "/v1/recordings/rec_unknown"
        for item in ("", "/video.mp4", "/playlist.m3u8", "/segments/0.m4s", "/inits/1.mp4", "/poster.jpg"):
            answers = [await holder.get(f"{recording}{item}") for recording in (foreign, none)]
            assert seen(answers[0], other["recording"]) == seen(answers[1], "rec_unknown")
            problem(answers[0], 404, "not_found", "recording")
        problem(
            await holder.get("/v1/recordings", params={"session": other["id"]}),
            404,
            "session_not_found",
            "session",
        )
        problem(await holder.delete(own["self"]), 403, "link_role", "role")
    problem(await viewer.delete(path), 403, "link_role", "role")
    assert (await controller.delete(path)).status_code == 200
    assert (await shared.owners[1].delete(own["self"])).status_code == 204
    # Each order is in the audit log, with its sender: the link, or the key.
    found = (await admin.get("/v1/audit", params={"tenant": "sharing", "limit": 9})).json()["entries"]
    assert [(one["operation"], one["target"], one["key"], one["code"]) for one in found][:3] == [
        ("delete_recording", begun.json()["id"], shared.key["id"], None),
        ("stop_recording", shared.id, link["id"], None),
        ("stop_recording", shared.id, found[2]["key"], "link_role"),
    ]
    assert ("start_recording", link["id"], None) in [
        (one["operation"], one["key"], one["code"]) for one in found
    ]
    await shared.owners[0].delete(other["links"]["self"])


def seen(answer: httpx.Response, session: str) -> tuple[int, Any]:
    """Return what an answer reveals of a session: all but the ids of itself and the request."""
    found = json.loads(answer.text.replace(session, "ID"))
    return answer.status_code, {name: value for name, value in found.items() if name != "request_id"}


async def test_a_link_to_another_session_is_as_one_to_none(
    shared: Shared, urls: list[str], client: Connect, socket: OpenSocket
) -> None:
    other = (await shared.owners[0].post("/v1/sessions", json={"prompt": PROMPT})).json()
    link = await shared.link(role="controller")
    holder = client(urls[0], link["token"])
    ticket = (await holder.post(f"{shared.path}/tickets")).json()["ticket"]
    unknown = other["id"][:-4] + "zzzz"
    for path, verb, sent in (
        ("", "GET", None),
        ("/prompts", "POST", {"prompt": "x"}),
        ("/tickets", "POST", None),
        ("/events", "GET", None),
    ):
        answers = [
            await holder.request(verb, f"/v1/sessions/{name}{path}", json=sent)
            for name in (other["id"], unknown)
        ]
        assert seen(answers[0], other["id"]) == seen(answers[1], unknown)
        problem(answers[0], 404, "session_not_found", "session")
    for path in ("events", "stream.mp4"):
        answer = await client(urls[0]).get(f"/v1/sessions/{other['id']}/{path}", params={"ticket": ticket})
        problem(answer, 404, "session_not_found", "session")
    async with socket(urls[0], other["id"], ticket=ticket) as opened:
        assert (await first_message(opened))["code"] == "session_not_found"
    await shared.owners[0].delete(other["links"]["self"])


async def test_another_tenant_gets_no_link_and_no_ticket(
    shared: Shared, urls: list[str], create: Create, client: Connect
) -> None:
    link = await shared.link()
    made = await create(tenant="stranger")
    await accepted(urls[0], made["key"], True, client)
    stranger = client(urls[0], made["key"])
    for verb, path in (
        ("POST", "/tickets"),
        ("POST", "/links"),
        ("GET", "/links"),
        ("DELETE", f"/links/{link['id']}"),
    ):
        sent: dict[str, Any] | None = {} if verb == "POST" else None
        answers = [
            await stranger.request(verb, f"/v1/sessions/{name}{path}", json=sent)
            for name in (shared.id, "ses_unknown")
        ]
        assert seen(answers[0], shared.id) == seen(answers[1], "ses_unknown")
        problem(answers[0], 404, "session_not_found", "session")
    assert (await client(urls[0], link["token"]).get(shared.path)).status_code == 200


async def test_a_ticket_opens_streams_and_nothing_else(
    shared: Shared, urls: list[str], client: Connect, socket: OpenSocket
) -> None:
    ticket = (await shared.owners[0].post(f"{shared.path}/tickets")).json()
    assert ticket["role"] == "controller"
    left = datetime.fromisoformat(ticket["expires_at"]) - datetime.now(UTC)
    assert timedelta(seconds=0) < left <= timedelta(seconds=61)
    text = ticket["ticket"]
    bare = client(urls[1])
    async with socket(urls[1], shared.id, ticket=text) as opened:
        assert (await first_message(opened))["role"] == "controller"
    async with bare.stream("GET", f"{shared.path}/events", params={"ticket": text}) as events:
        assert events.status_code == 200
    # Neither in the address of another request, nor as a key.
    for answer in (
        await bare.get(shared.path, params={"ticket": text}),
        await client(urls[1], text).get(shared.path),
        await bare.post(f"{shared.path}/prompts", params={"ticket": text}, json={"prompt": "x"}),
        await client(urls[1], text).post(f"{shared.path}/tickets"),
    ):
        problem(answer, 401, "unauthorized", "Authorization")
    for wrong in (text[:-2] + "AA", f"tst_{'0' * 16}.e30.AA", "tst_", "x", shared.key["key"]):
        answer = await bare.get(f"{shared.path}/events", params={"ticket": wrong})
        problem(answer, 401, "unauthorized", "Authorization")


async def test_an_expired_ticket_opens_no_stream_and_its_stream_goes_on(
    pool: Pool, client: Connect, socket: OpenSocket
) -> None:
    key = "a-key-of-a-list-0123456789"
    url = pool.gateway(
        "short_tickets", TURBOSERVE_API_KEYS=f"{key}=sharing", DRAWN_KEY=key, TURBOSERVE_TICKET_LIFETIME_S="2"
    )
    owner = client(url, key)
    session = (await owner.post("/v1/sessions", json={"prompt": PROMPT})).json()
    path = session["links"]["self"]
    async with AsyncExitStack() as streams:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                ticket = (await owner.post(f"{path}/tickets")).json()["ticket"]
                opened = await streams.enter_async_context(socket(url, session["id"], ticket=ticket))
                first = await first_message(opened)
                if first["type"] == "hello":
                    break
                # A busy machine may need longer than the ticket lasts.
                assert first["code"] == "ticket_expired"

        async def expired() -> bool:
            async with socket(url, session["id"], ticket=ticket) as late:
                return (await first_message(late)).get("code") == "ticket_expired"

        await eventually(expired)
        await opened.send(json.dumps({"type": "ping", "id": "still-here"}))
        while (await first_or_skip(opened))["type"] != "pong":
            pass
    await owner.delete(path)


async def test_a_revoked_link_ends_its_streams_at_every_gateway(
    shared: Shared, urls: list[str], client: Connect, socket: OpenSocket
) -> None:
    link = await shared.link()
    ticket = (await client(urls[0], link["token"]).post(f"{shared.path}/tickets")).json()["ticket"]
    # Nothing is sent over the streams meanwhile.
    await shared.owners[0].post(f"{shared.path}/pause")
    async with (
        socket(urls[0], shared.id, {"Authorization": f"Bearer {link['token']}"}) as direct,
        socket(urls[1], shared.id, ticket=ticket) as by_ticket,
        client(urls[1], link["token"]).stream("GET", f"{shared.path}/events") as events,
    ):
        for opened in (direct, by_ticket):
            assert (await first_message(opened))["type"] == "hello"
        assert events.status_code == 200
        await shared.revoke(link)
        async with asyncio.timeout(PATIENCE_S):
            for opened in (direct, by_ticket):
                with suppress(websockets.ConnectionClosed):
                    async for _ in opened:
                        pass
                assert opened.close_code == 4401
            async for _ in events.aiter_bytes():
                pass
    for url in urls:
        problem(await client(url, link["token"]).get(shared.path), 401, "link_ended", "Authorization")
        answer = await client(url).get(f"{shared.path}/events", params={"ticket": ticket})
        problem(answer, 401, "link_ended", "Authorization")
    [listed] = (await shared.owners[1].get(f"{shared.path}/links")).json()["links"]
    assert (listed["id"], "token" in listed) == (link["id"], False)
    assert listed["revoked_at"] is not None


async def test_an_expired_link_ends_with_its_streams(
    shared: Shared, urls: list[str], client: Connect, socket: OpenSocket
) -> None:
    link: dict[str, Any] = {}

    async def created() -> bool:
        # Refused if the request takes longer.
        soon = datetime.now(UTC) + timedelta(seconds=4)
        answer = await shared.owners[0].post(f"{shared.path}/links", json={"expires_at": soon.isoformat()})
        link.update(answer.json())
        return answer.status_code == 201

    await eventually(created)
    async with socket(urls[0], shared.id, {"Authorization": f"Bearer {link['token']}"}) as opened:
        if (await first_message(opened))["type"] == "hello":
            async with asyncio.timeout(PATIENCE_S):
                with suppress(websockets.ConnectionClosed):
                    async for _ in opened:
                        pass
    assert opened.close_code == 4401
    problem(await client(urls[0], link["token"]).get(shared.path), 401, "link_ended", "Authorization")


async def test_the_streams_of_a_ticket_end_with_its_key(
    shared: Shared, urls: list[str], admin: httpx.AsyncClient, socket: OpenSocket, client: Connect
) -> None:
    link = await shared.link()
    ticket = (await shared.owners[0].post(f"{shared.path}/tickets")).json()["ticket"]
    async with socket(urls[1], shared.id, ticket=ticket) as opened:
        assert (await first_message(opened))["type"] == "hello"
        await admin.delete(f"/v1/keys/{shared.key['id']}")
        async with asyncio.timeout(PATIENCE_S):
            with suppress(websockets.ConnectionClosed):
                async for _ in opened:
                    pass
        assert opened.close_code == 4401
    async with socket(urls[1], shared.id, ticket=ticket) as late:
        assert (await first_message(late))["code"] == "unauthorized"
    # A link belongs to the session, and outlasts the key that created it.
    assert (await client(urls[0], link["token"]).get(shared.path)).status_code == 200


async def test_a_reader_shares_no_control(
    shared: Shared, urls: list[str], create: Create, client: Connect, socket: OpenSocket
) -> None:
    made = await create(tenant="sharing", scopes=["sessions:read"])
    await accepted(urls[0], made["key"], True, client)
    reader = client(urls[0], made["key"])
    problem(await reader.post(f"{shared.path}/links", json={}), 403, "missing_scope", "scope")
    problem(
        await reader.post(f"{shared.path}/tickets", json={"role": "controller"}),
        403,
        "missing_scope",
        "scope",
    )
    ticket = (await reader.post(f"{shared.path}/tickets")).json()
    assert ticket["role"] == "viewer"
    async with socket(urls[0], shared.id, ticket=ticket["ticket"]) as opened:
        assert (await first_message(opened))["role"] == "viewer"


@pytest.mark.parametrize("text", ["role", "session", "signature", "none"])
async def test_a_changed_link_is_an_unknown_key(
    shared: Shared, urls: list[str], client: Connect, text: str
) -> None:
    token = (await shared.link())["token"]
    head, payload, mac = token.split(".")
    changed = {
        "role": f"{head}.{payload[:-4]}AAAA.{mac}",
        "session": f"{head}.{payload[::-1]}.{mac}",
        "signature": f"{head}.{payload}.{mac[:-3]}AAA",
        "none": f"{head}.{payload}.",
    }[text]
    problem(await client(urls[0], changed).get(shared.path), 401, "unauthorized", "Authorization")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"role": "admin"}, "role"),
        ({"role": None}, "role"),
        ({"expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
        ({"expires_at": "2099-01-01T00:00:00Z"}, "expires_at"),
        ({"label": "x" * 201}, "label"),
        ({"tenant": "other"}, "tenant"),
    ],
)
async def test_an_invalid_link_is_refused(shared: Shared, change: dict[str, Any], field: str) -> None:
    answer = await shared.owners[0].post(f"{shared.path}/links", json=change)
    problem(answer, 422, "invalid_input", field)


async def test_a_repeat_creates_no_second_link(shared: Shared) -> None:
    headers = {"Idempotency-Key": "share-1"}
    made = [
        (await owner.post(f"{shared.path}/links", json={}, headers=headers)).json() for owner in shared.owners
    ]
    assert made[0]["id"] == made[1]["id"]
    other = await shared.owners[0].post(f"{shared.path}/links", json={"role": "controller"}, headers=headers)
    problem(other, 422, "idempotency_key_reused", "Idempotency-Key")
    for name in ("no_link", "a%20b", "x" * 65):
        problem(await shared.owners[0].delete(f"{shared.path}/links/{name}"), 404, "not_found", "link")


async def test_a_key_in_an_address_is_refused(
    shared: Shared, urls: list[str], socket: OpenSocket, client: Connect
) -> None:
    query = {"access_token": shared.key["key"]}
    for path in ("", "/events", "/stream.mp4", "/stream"):
        for api in (client(urls[0]), shared.owners[0]):
            answer = await api.get(shared.path + path, params=query)
            found = problem(answer, 401, "key_in_address", "access_token")
            assert "/tickets" in found["detail"]
            assert shared.key["key"] not in answer.text
    async with socket(urls[0], shared.id, **query) as opened:
        assert (await first_message(opened))["code"] == "key_in_address"


async def test_no_text_of_a_link_or_ticket_is_stored_or_logged(
    pool: Pool, shared: Shared, urls: list[str], client: Connect
) -> None:
    link = await shared.link()
    ticket = (await shared.owners[0].post(f"{shared.path}/tickets")).json()["ticket"]
    await client(urls[0], link["token"]).get(shared.path)
    async with client(urls[0]).stream("GET", f"{shared.path}/events", params={"ticket": ticket}) as events:
        assert events.status_code == 200
    secrets = [text.rpartition(".")[2] for text in (link["token"], ticket)]
    for name in ("stored_0", "stored_1", "state-store"):
        assert not any(secret in pool.log(name) for secret in secrets)
    database = await asyncpg.connect(pool.postgres.url("turboserve"))
    try:
        assert link["id"] in str(rows := await database.fetch("select * from session_links"))
        assert not any(secret in str(rows) for secret in secrets)
    finally:
        await database.close()


async def test_a_gateway_without_keys_has_links_as_well(
    keyless_url: str, client: Connect, socket: OpenSocket
) -> None:
    everyone = client(keyless_url)
    session = (await everyone.post("/v1/sessions", json={"prompt": PROMPT})).json()
    path = session["links"]["self"]
    link = (await everyone.post(f"{path}/links", json={})).json()
    viewer = client(keyless_url, link["token"])
    assert (await viewer.get(path)).status_code == 200
    problem(await viewer.delete(path), 403, "link_role", "role")
    ticket = (await viewer.post(f"{path}/tickets")).json()["ticket"]
    async with socket(keyless_url, session["id"], ticket=ticket) as opened:
        assert (await first_message(opened))["role"] == "viewer"
    await everyone.delete(path)

"""API keys in the database, over two gateways: created, used, listed and revoked."""

from __future__ import annotations

import json
import signal
from typing import Any

import asyncpg
import httpx
import pytest

from tests.helpers.pool_harness import Pool
from tests.helpers.problem import problem
from tests.helpers.waiting import eventually
from tests.security.access.conftest import ADMIN, NEW, Connect, Create, accepted
from turboserve.contracts.keys import Scope

READ, WRITE = Scope.SESSIONS_READ.value, Scope.SESSIONS_WRITE.value


async def test_a_key_may_do_what_its_scopes_name(urls: list[str], create: Create, client: Connect) -> None:
    reader, writer = await create(scopes=[READ]), await create(scopes=[WRITE])
    for made in (reader, writer):
        api = client(urls[0], made["key"])

        async def known(api: httpx.AsyncClient = api) -> bool:
            return (await api.get("/v1/sessions")).status_code != 401

        await eventually(known)
    reads, writes = client(urls[0], reader["key"]), client(urls[0], writer["key"])
    body = {"prompt": "a red circle"}
    refused = problem(await reads.post("/v1/sessions", json=body), 403, "missing_scope", "scope")
    assert refused["limit"] == WRITE
    # The scope is checked before the body.
    problem(await reads.post("/v1/sessions", json={"prompt": 5}), 403, "missing_scope", "scope")
    session = (await writes.post("/v1/sessions", json=body)).json()
    problem(await writes.get(session["links"]["self"]), 403, "missing_scope", "scope")
    assert (await reads.get(session["links"]["self"])).status_code == 200
    problem(await reads.delete(session["links"]["self"]), 403, "missing_scope", "scope")
    for api in (reads, writes):
        problem(await api.get("/v1/keys"), 403, "missing_scope", "scope")
        problem(await api.post("/v1/keys", json=NEW), 403, "missing_scope", "scope")
    assert (await writes.delete(session["links"]["self"])).status_code == 200


async def test_a_repeat_creates_no_second_key_and_does_not_show_the_first(
    admin: httpx.AsyncClient, urls: list[str], client: Connect
) -> None:
    headers = {"Idempotency-Key": "order-1"}
    first = (await admin.post("/v1/keys", json=NEW, headers=headers)).json()
    again = await client(urls[1], ADMIN).post("/v1/keys", json=NEW, headers=headers)
    assert again.status_code == 201
    assert again.json() == {**first, "key": None}
    await accepted(urls[0], first["key"], True, client)
    other = await admin.post("/v1/keys", json={**NEW, "tenant": "boss"}, headers=headers)
    problem(other, 422, "idempotency_key_reused", "Idempotency-Key")


async def test_the_keys_are_listed_by_page_without_their_texts(
    admin: httpx.AsyncClient, create: Create
) -> None:
    made = [await create(tenant="paged") for _ in range(3)]
    found: list[dict[str, Any]] = []
    after: dict[str, int] = {}
    while True:
        page = (await admin.get("/v1/keys", params={"tenant": "paged", "limit": 2, **after})).json()
        found += page["keys"]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert [key["id"] for key in found] == [key["id"] for key in reversed(made)]
    assert all("key" not in key and "hash" not in key for key in found)
    assert not any(key["key"] in json.dumps(found) for key in made)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tenant": "a tenant"}, "tenant"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["sessions"]}, "scopes.0"),
        ({"expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
        ({"expires_at": 1_900_000_000}, "expires_at"),
        ({"label": "x" * 201}, "label"),
        ({"operator": True}, "operator"),
    ],
)
async def test_an_invalid_key_is_refused(
    admin: httpx.AsyncClient, change: dict[str, Any], field: str
) -> None:
    problem(await admin.post("/v1/keys", json={**NEW, **change}), 422, "invalid_input", field)


@pytest.mark.parametrize("name", ["no_key", "a%20b", "x" * 65])
async def test_an_unknown_key_is_not_found(admin: httpx.AsyncClient, name: str) -> None:
    for verb in ("GET", "DELETE"):
        problem(await admin.request(verb, f"/v1/keys/{name}"), 404, "not_found", "key")


async def test_the_last_use_is_shown(
    admin: httpx.AsyncClient, create: Create, client: Connect, urls: list[str]
) -> None:
    made = await create()
    assert made["last_used_at"] is None
    await accepted(urls[1], made["key"], True, client)

    async def noted() -> bool:
        return (await admin.get(f"/v1/keys/{made['id']}")).json()["last_used_at"] is not None

    await eventually(noted)


async def test_a_gateway_without_the_state_store_keeps_its_keys(
    pool: Pool, urls: list[str], create: Create, client: Connect
) -> None:
    made = await create()
    for url in urls:
        await accepted(url, made["key"], True, client)
    pool.stop("state-store", signal.SIGKILL)
    try:
        # An answer of the pools needs the key, and no state store.
        for url in urls:
            assert (await client(url, made["key"]).get("/v1/pools")).status_code == 200
            assert (await client(url, "a-wrong-key-0123456789").get("/v1/pools")).status_code == 401
    finally:
        pool.start_store()
    for url in urls:
        await accepted_again(url, made["key"], client)


async def accepted_again(url: str, key: str, client: Connect) -> None:
    api = client(url, key)

    async def serves() -> bool:
        return (await api.get("/v1/sessions")).status_code == 200

    await eventually(serves)


async def test_no_text_of_a_key_is_stored_or_logged(
    pool: Pool, urls: list[str], create: Create, client: Connect
) -> None:
    made = await create(label="secret")
    await accepted(urls[0], made["key"], True, client)
    secret = made["key"].rpartition("_")[2]
    for name in ("stored_0", "stored_1", "state-store"):
        assert secret not in pool.log(name)
    database = await asyncpg.connect(pool.postgres.url("turboserve"))
    try:
        rows = await database.fetch("select * from api_keys")
        assert made["id"] in str(rows)
        assert secret not in str(rows)
    finally:
        await database.close()


async def test_keys_outside_the_database_have_no_routes(keyless_url: str, client: Connect) -> None:
    api = client(keyless_url)
    for verb, path in (("GET", ""), ("POST", ""), ("GET", "/k1"), ("DELETE", "/k1")):
        answer = await api.request(verb, f"/v1/keys{path}", json=NEW if verb == "POST" else None)
        found = problem(answer, 409, "keys_not_stored", "TURBOSERVE_API_KEYS_STORE")
        # The remedy is named, since no other key would help.
        assert "TURBOSERVE_API_KEYS_STORE=1" in found["detail"]
        assert "turboserve up --auth" in found["detail"]

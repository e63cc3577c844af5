"""The audit log over a real gateway: what is recorded, who reads it, and that it has no secret."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import asyncpg
import httpx
from typer.testing import CliRunner

from tests.helpers.pool_harness import Pool
from tests.helpers.problem import problem
from tests.helpers.waiting import eventually
from tests.security.access.conftest import ADMIN, NEW, Connect, Create, accepted
from turboserve.cli.main import app


async def entries(admin: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    answer = await admin.get("/v1/audit", params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["entries"]
    return found


async def test_every_change_of_keys_and_links_is_recorded_before_its_answer(
    admin: httpx.AsyncClient, urls: list[str], create: Create, client: Connect
) -> None:
    made = await create(tenant="audited", label="nightly")
    [created] = await entries(admin, operation="create_key", limit=1)
    assert (created["target"], created["tenant"], created["key"]) == (made["id"], "ops", "first")
    assert (created["status"], created["code"], created["address"]) == (201, None, "127.0.0.1")
    assert json.loads(created["change"]) == {**NEW, "tenant": "audited", "label": "nightly"}
    await accepted(urls[1], made["key"], True, client)
    owner = client(urls[1], made["key"])
    session = (await owner.post("/v1/sessions", json={"prompt": "a red circle"})).json()
    path = session["links"]["self"]
    link = (await owner.post(f"{path}/links", json={"label": "review"})).json()
    await owner.delete(f"{path}/links/{link['id']}")
    await owner.post(f"{path}/migrate", json={})
    problem(await owner.put("/v1/pools/local/override", json={"workers": 1}), 403, "missing_scope", "scope")
    problem(await owner.post("/v1/keys", json=NEW), 403, "missing_scope", "scope")
    problem(await owner.post(f"{path}/links", json={"role": "admin"}), 422, "invalid_input", "role")
    await admin.delete(f"/v1/keys/{made['id']}")
    found = [(one["operation"], one["target"], one["code"]) for one in await entries(admin, tenant="audited")]
    # The migration may be refused: there is one worker.
    assert [one[:2] if one[0] == "migrate_session" else one for one in found] == [
        ("create_link", session["id"], "invalid_input"),
        ("create_key", "", "missing_scope"),
        ("set_pool_override", "local", "missing_scope"),
        ("migrate_session", session["id"]),
        ("revoke_link", link["id"], None),
        ("create_link", link["id"], None),
    ]
    [revoked] = await entries(admin, operation="revoke_key", limit=1)
    assert (revoked["target"], revoked["status"]) == (made["id"], 200)
    # Sessions have events, and are no orders.
    assert not await entries(admin, operation="create_session")
    # What was refused may have anything in its body.
    assert all(one["change"] == "" for one in await entries(admin, refused="true"))
    await client(urls[0], ADMIN).delete(path)


async def test_only_admins_read_it(
    admin: httpx.AsyncClient, urls: list[str], create: Create, client: Connect
) -> None:
    made = await create(tenant="audited", scopes=["sessions:read", "sessions:write", "pool:write"])
    await accepted(urls[0], made["key"], True, client)
    problem(await client(urls[0], made["key"]).get("/v1/audit"), 403, "missing_scope", "scope")
    problem(await client(urls[0]).get("/v1/audit"), 401, "unauthorized", "Authorization")
    for query, field in (
        ({"operation": "a b"}, "operation"),
        ({"limit": 0}, "limit"),
        ({"since": "x"}, "since"),
    ):
        problem(await admin.get("/v1/audit", params=query), 422, "invalid_input", field)


async def test_no_secret_is_in_it(
    pool: Pool, admin: httpx.AsyncClient, urls: list[str], create: Create, client: Connect
) -> None:
    made = await create(tenant="secretive")
    await accepted(urls[0], made["key"], True, client)
    owner = client(urls[0], made["key"])
    session = (await owner.post("/v1/sessions", json={"prompt": "a red circle"})).json()
    link = (await owner.post(f"{session['links']['self']}/links")).json()
    await owner.post(f"{session['links']['self']}/links", json={"key": made["key"]})
    await owner.delete(session["links"]["self"])
    database = await asyncpg.connect(pool.postgres.url("turboserve"))
    try:
        rows = str(await database.fetch("select * from audit_log"))
    finally:
        await database.close()
    assert link["id"] in rows
    for secret in (made["key"], link["token"], ADMIN):
        assert secret not in rows
        assert secret.rpartition("_")[2].rpartition(".")[2] not in rows


async def test_an_entry_waits_for_the_state_store(
    pool: Pool, admin: httpx.AsyncClient, urls: list[str], client: Connect
) -> None:
    pool.stop("state-store", signal.SIGKILL)
    try:
        answer = await admin.delete("/v1/keys/nobody-asked")
        assert answer.status_code in (503, 504)
    finally:
        pool.start_store()

    async def recorded() -> bool:
        answer = await admin.get("/v1/audit", params={"operation": "revoke_key", "refused": "true"})
        found = answer.json()["entries"] if answer.status_code == 200 else []
        return any(one["target"] == "nobody-asked" and one["status"] in (503, 504) for one in found)

    await eventually(recorded)


async def test_the_command_prints_it(urls: list[str], create: Create) -> None:
    made = await create(tenant="printed")
    words = ["audit", "--url", urls[0], "--key", ADMIN, "--operation", "create_key", "--limit", "5"]

    def run(*more: str) -> Any:
        return CliRunner().invoke(app, [*words, *more], env={"COLUMNS": "300"})

    shown = await asyncio.to_thread(run)
    assert shown.exit_code == 0, shown.output
    assert made["id"] in shown.output
    lines = (await asyncio.to_thread(run, "--json", "--accepted")).output.splitlines()
    assert made["id"] in {json.loads(line)["target"] for line in lines}
    assert len(lines) <= 5
    assert (await asyncio.to_thread(run, "--key", "a-wrong-key-0123456789")).exit_code != 0

"""Usage by day: what it counts on real services, and who may read it."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from datetime import UTC, datetime
from typing import Any

import httpx
from typer.testing import CliRunner

from tests.helpers.one_day import on_one_day
from tests.helpers.problem import problem
from tests.helpers.waiting import eventually
from tests.security.access.conftest import ADMIN, Connect, Create, OpenSocket, accepted
from turboserve.cli.main import app
from turboserve.ids import new_id

PROMPT = "a red circle"


@on_one_day
async def test_a_tenant_reads_its_own_usage_and_an_admin_all(
    admin: httpx.AsyncClient, urls: list[str], create: Create, client: Connect, socket: OpenSocket
) -> None:
    tenants = [new_id("usage") for _ in range(2)]
    keys = [await create(tenant=tenant) for tenant in tenants]
    for key in keys:
        await accepted(urls[0], key["key"], True, client)
    ours, theirs = (client(urls[0], key["key"]) for key in keys)
    session = (await ours.post("/v1/sessions", json={"prompt": PROMPT})).json()
    found: list[dict[str, Any]] = []

    async def counted() -> bool:
        found[:] = (await ours.get("/v1/usage")).json()["usage"]
        return bool(found) and all(
            found[0][name] > 0 for name in ("chunks", "viewer_seconds", "delivered_bytes")
        )

    async with socket(urls[0], session["id"], {"Authorization": f"Bearer {keys[0]['key']}"}):
        await eventually(counted)
    await ours.delete(session["links"]["self"])
    [day] = found
    assert (day["tenant"], day["key"]) == (tenants[0], keys[0]["id"])
    assert day["day"] == datetime.now(UTC).date().isoformat()
    # Nothing of another tenant, not even that it exists.
    assert (await theirs.get("/v1/usage")).json()["usage"] == []
    for path in ("/v1/usage", "/v1/usage.csv"):
        refused = await theirs.get(path, params={"tenant": tenants[0]})
        assert problem(refused, 403, "missing_scope", "scope")["limit"] == "admin"
        problem(await client(urls[0]).get(path), 401, "unauthorized", "Authorization")
    everything = (await admin.get("/v1/usage", params={"limit": 1_000})).json()["usage"]
    assert tenants[0] in {one["tenant"] for one in everything}
    only = (await admin.get("/v1/usage", params={"tenant": tenants[0]})).json()["usage"]
    assert {one["tenant"] for one in only} == {tenants[0]}
    exported = await ours.get("/v1/usage.csv")
    assert exported.headers["content-type"].startswith("text/csv")
    [row] = csv.DictReader(io.StringIO(exported.text))
    assert (row["tenant"], row["key"], row["currency"]) == (tenants[0], keys[0]["id"], "USD")
    assert int(row["chunks"]) >= day["chunks"]
    assert float(row["video_seconds"]) > 0
    assert int(row["delivered_bytes"]) > 0
    # A sum has nothing of another tenant either, and no member that it is a sum over.
    for one in ([day["day"], None], [None, None]):
        params = {"group_by": ["day"]} if one[0] else {"group_by": ["tenant"]}

        async def equals_the_table() -> bool:
            # The session's last chunks may be counted between two requests.
            [row] = csv.DictReader(io.StringIO((await ours.get("/v1/usage.csv")).text))
            answer = (await ours.get("/v1/usage", params=params)).json()  # noqa: B023
            [entry] = answer["usage"]
            assert answer["group_by"] == params["group_by"]  # noqa: B023
            assert (entry["day"], entry["key"]) == tuple(one)  # noqa: B023
            return bool(entry["chunks"] == int(row["chunks"]))

        await eventually(equals_the_table)

    async def total_of_the_tenant() -> dict[str, str]:
        summed = (await ours.get("/v1/usage.csv", params={"group_by": "tenant"})).text
        [total] = csv.DictReader(io.StringIO(summed))
        return total

    total = await total_of_the_tenant()
    assert (total["day"], total["tenant"], total["key"]) == ("", tenants[0], "")

    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["usage", "--url", urls[0], *words], env={"COLUMNS": "300"})

    words = ["--key", ADMIN, "--tenant", tenants[0]]
    shown = await asyncio.to_thread(run, *words, "--csv")
    assert shown.exit_code == 0, shown.output
    assert [row["key"] for row in csv.DictReader(io.StringIO(shown.stdout))] == [keys[0]["id"]]
    lines = (await asyncio.to_thread(run, *words, "--json")).stdout.splitlines()
    assert [json.loads(line)["tenant"] for line in lines] == [tenants[0]]
    assert keys[0]["id"] in (await asyncio.to_thread(run, *words)).stdout
    by_tenant = await asyncio.to_thread(run, *words, "--group-by", "tenant", "--json")
    assert [json.loads(line)["key"] for line in by_tenant.stdout.splitlines()] == [None]
    hours: list[dict[str, Any]] = []

    async def hours_equal_the_total() -> bool:
        # The session's last chunks may be counted between two requests.
        fine = await asyncio.to_thread(run, *words, "--by", "hour", "--group-by", "model", "--json")
        hours[:] = [json.loads(line) for line in fine.stdout.splitlines()]
        total = await total_of_the_tenant()
        return bool(sum(hour["chunks"] for hour in hours) == int(total["chunks"]))

    await eventually(hours_equal_the_total)
    for hour in hours:
        assert (hour["model"], hour["width"], hour["tenant"], hour["key"]) == ("toyworld", None, None, None)
        assert hour["hour"].startswith(f"{hour['day']}T")
        assert hour["hour"].endswith(":00:00.000000Z")
    rows = csv.DictReader(io.StringIO((await asyncio.to_thread(run, *words, "--by", "hour", "--csv")).stdout))
    assert {(row["hour"], row["model"]) for row in rows} == {
        (hour["hour"].replace(".000000", ""), "") for hour in hours
    }
    wrong = await asyncio.to_thread(run, *words, "--group-by", "worker")
    assert wrong.exit_code == 1
    assert "'day', 'hour', 'tenant', 'key' or 'model'" in wrong.output
    assert (await asyncio.to_thread(run, *words, "--csv", "--json")).exit_code == 1


async def test_days_outside_the_range_are_refused(admin: httpx.AsyncClient) -> None:
    for path in ("/v1/usage", "/v1/usage.csv"):
        late = await admin.get(path, params={"from": "2026-11-02", "to": "2026-11-01"})
        problem(late, 422, "invalid_input", "from")
        problem(await admin.get(path, params={"from": "1969-01-01"}), 422, "invalid_input", "from")
        problem(await admin.get(path, params={"to": "x"}), 422, "invalid_input", "to")
        refused = problem(
            await admin.get(path, params={"group_by": "worker"}), 422, "invalid_input", "group_by.0"
        )
        assert refused["limit"] == "'day', 'hour', 'tenant', 'key' or 'model'"
        problem(await admin.get(path, params={"by": "week"}), 422, "invalid_input", "by")
    problem(await admin.get("/v1/usage", params={"after": "x"}), 422, "invalid_input", "after")
    problem(await admin.get("/v1/usage", params={"limit": 0}), 422, "invalid_input", "limit")

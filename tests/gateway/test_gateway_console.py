"""REST of the operators' console, on real services: a pool's past, and who may read it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import StartSession
from tests.helpers.pool_harness import Pool
from tests.helpers.reporting_autoscaler import ReportingAutoscaler
from tests.helpers.waiting import eventually
from turboserve.contracts.cost import Rental
from turboserve.contracts.pool_history import PoolDecision, PoolSample

KEYS = {"operator": "key-of-the-operator-0123456789", "viewer": "key-of-a-tenant-0123456789abc"}
ROUTES = ("history", "decisions", "migrations", "workers", "cost", "queue")


def when(seconds_ago: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat()


async def drawn_worker(api: httpx.AsyncClient) -> str:
    workers = (await api.get("/v1/workers")).json()["workers"]
    return next(str(one["id"]) for one in workers if one["phase"] == "ready" and one["model"] == "toyworld")


async def read(api: httpx.AsyncClient, pool: str, name: str, **query: Any) -> dict[str, Any]:
    answer = await api.get(f"/v1/pools/{pool}/{name}", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_an_operator_reads_what_the_pool_did(
    api: httpx.AsyncClient, autoscaler: ReportingAutoscaler, start: StartSession
) -> None:
    pool, worker = "console_past", await drawn_worker(api)
    began = time.time()
    decision = PoolDecision(
        number=1,
        at=began,
        kind="scaling",
        action="out",
        target=2,
        previous=1,
        advice=2,
        reason="load 0.95 is above 0.85",
        numbers={"rho_max": 0.95},
    )
    sample = PoolSample(ready=1, target=2, capacity=8, required=9, waiting=1, rho_max=0.95)
    rental = Rental(worker=worker, kind="test", age_s=60.0, ready_ago_s=50.0)
    await autoscaler.publish(pool, model="toyworld")
    for number in (1, 2):
        # The second report is a repetition, as after an answer that was lost.
        reported = [decision, decision.model_copy(update={"number": 2, "action": "hold"})][:number]
        await autoscaler.report(pool, rental, sample=sample, decisions=reported, process="asc_console")
    session = (await start())["id"]

    points = (await read(api, pool, "history"))["points"]
    assert (points[-1]["required"], points[-1]["waiting"], points[-1]["capacity"]) == (9, 1, 8)
    decisions = (await read(api, pool, "decisions"))["decisions"]
    assert [one["action"] for one in decisions] == ["hold", "out"]
    assert decisions[1]["numbers"] == {"rho_max": 0.95}

    async def lanes(**query: Any) -> list[dict[str, Any]]:
        page = await read(api, pool, "workers", **query)
        mine = [one for one in page["workers"] if one["worker"] == worker]
        return [one for lane in mine for one in lane["sessions"] if one["session"] == session]

    # The worker generates ahead without a viewer, and the store writes every two seconds.
    await eventually(lambda: lanes(**{"from": when(120)}))
    [mine] = await lanes(**{"from": when(120)})
    assert mine["tenant"] == "default"
    assert [bar["first"] for bar in mine["bars"]] == list(range(len(mine["bars"])))
    [long] = await lanes(**{"from": when(3_000)}, step=600)
    assert sum(bar["chunks"] for bar in long["bars"]) >= len(mine["bars"])
    assert (await lanes(**{"from": when(7_200), "to": when(3_600)})) == []

    async def counted() -> bool:
        found = await read(api, pool, "history", step=60)
        return any(int(point["chunks"]) > 0 for point in found["points"])

    async def paid() -> bool:
        await autoscaler.report(pool, rental.model_copy(update={"age_s": 60.0 + time.time() - began}))
        cost = await read(api, pool, "cost")
        named = {(one["model"], one["width"]) for one in cost["models"]}
        return "default" in [one["tenant"] for one in cost["tenants"]] and ("toyworld", None) in named

    await autoscaler.report(pool, rental, sample=sample)
    await eventually(counted)
    await eventually(paid)
    assert (await read(api, pool, "queue"))["total"] == 0
    assert (await read(api, pool, "migrations"))["migrations"] == []


@pytest.mark.parametrize(
    ("name", "query", "field"),
    [
        ("history", {"from": when(10), "to": when(20)}, "from"),
        ("history", {"from": when(90_000)}, "from"),
        ("history", {"from": when(80_000), "step": 10}, "step"),
        ("cost", {"step": 10}, "step"),
        ("workers", {"from": "yesterday"}, "from"),
        ("decisions", {"limit": 501}, "limit"),
    ],
)
async def test_a_refusal_names_the_field(
    api: httpx.AsyncClient,
    autoscaler: ReportingAutoscaler,
    name: str,
    query: dict[str, Any],
    field: str,
) -> None:
    await autoscaler.publish("console_limits")
    answer = await api.get(f"/v1/pools/console_limits/{name}", params=query)
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["field"].endswith(field)


async def test_only_operators_read_it_and_an_unknown_pool_has_no_past(
    pool: Pool, autoscaler: ReportingAutoscaler
) -> None:
    keys = ",".join(f"{key}={tenant}" for tenant, key in KEYS.items())
    url = pool.gateway(
        "console",
        TURBOSERVE_API_KEYS=keys,
        TURBOSERVE_OPERATORS="operator",
        DRAWN_KEY=KEYS["operator"],
    )
    # It has reported to the state store, and to no gateway that still runs.
    await autoscaler.report("console_silent", sample=PoolSample(ready=4))

    async def of(tenant: str, name: str, route: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as client:
            return await client.get(f"/v1/pools/{name}/{route}")

    async def known() -> bool:
        return (await of("operator", "console_silent", "history")).status_code != 503

    # A young gateway waits for the first reports of autoscalers.
    await eventually(known)
    for route in ROUTES:
        refused = await of("viewer", "console_silent", route)
        assert (refused.status_code, refused.json()["code"]) == (403, "missing_scope")
        assert (await of("operator", "console_silent", route)).status_code == 200
        missing = await of("operator", "console_none", route)
        assert (missing.status_code, missing.json()["code"]) == (404, "pool_not_found")
    [point] = (await of("operator", "console_silent", "history")).json()["points"]
    assert point["ready"] == 4
    pool.stop("console")

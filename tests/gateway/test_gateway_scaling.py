"""The pool and its cost over HTTP, with an autoscaler's reports over the broker."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from turboserve import subjects
from turboserve.autoscaler.control.default import default_table
from turboserve.bus import Bus
from turboserve.config import Settings
from turboserve.contracts.autoscale import ScalingStatus
from turboserve.contracts.cost import Rental
from turboserve.contracts.pool import PoolOrders, PoolReport, PoolStatus

KEY_A, KEY_B = "key-of-acme-0123456789", "key-of-boss-0123456789"
SCALING = ScalingStatus(
    mode="auto",
    target=1,
    advice=1,
    least=1,
    most=4,
    volatility=0.5,
    level=1,
    latency_weight=0.2,
    target_utilization=0.8,
    stale=False,
)


class Autoscaler:
    """Publishes an autoscaler's reports, as its user, to the gateway at `api`."""

    def __init__(self, bus: Bus, api: httpx.AsyncClient) -> None:
        self.bus, self.api = bus, api

    async def says(self, pool: str, **status: Any) -> None:
        """Publish a status and wait until the gateway has received it."""
        at = time.time()
        values = {"provider": "local", "target": 1, "ready": 1, "orders": 0, "scaling": SCALING, **status}
        word = PoolStatus(pool=pool, at=at, **values)
        deadline = time.monotonic() + 120
        while (await self.api.get("/v1/pool", params={"pool": pool})).json().get("at") != at:
            assert time.monotonic() < deadline, "the gateway does not hear it"
            await self.bus.publish(subjects.POOL, "status", word)
            await asyncio.sleep(0.05)

    async def reports(self, pool: str, *rentals: Rental) -> PoolOrders:
        report = PoolReport(pool=pool, model="toyworld", rentals=rentals)
        return await self.bus.call(subjects.REPORT_POOL, report)


@pytest.fixture
async def autoscaler(pool: Any, api: httpx.AsyncClient) -> AsyncIterator[Autoscaler]:
    settings = Settings(
        nats_url=pool.nats.address,
        nats_user="autoscaler",
        nats_password=SecretStr(pool.nats.passwords["autoscaler"]),
        request_deadline_s=60,
    )
    bus = await Bus.connect("autoscaler", settings)
    yield Autoscaler(bus, api)
    await bus.close()


def problem(answer: httpx.Response, status: int, code: str, field: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body: dict[str, Any] = answer.json()
    assert (body["code"], body.get("field")) == (code, field)
    return body


async def test_the_pool_says_why_it_is_as_it_is(api: httpx.AsyncClient, autoscaler: Autoscaler) -> None:
    before = time.monotonic()
    await autoscaler.says("why", start_up_s=3.5)
    found = (await api.get("/v1/pool", params={"pool": "why"})).json()
    assert (found["pool"], found["target"], found["start_up_s"]) == ("why", 1, 3.5)
    assert (found["scaling"]["level"], found["scaling"]["target_utilization"]) == (1, 0.8)
    assert 0 <= found["age_s"] <= time.monotonic() - before
    assert "1 worker," in found["summary"]
    await autoscaler.says("why", reason="1 of 1 workers are not ready; why-0: launch: no")
    assert "not ready" in (await api.get("/v1/pool?pool=why")).json()["summary"]
    await autoscaler.says("why", provider_error="the cluster is away", reason="x")
    assert "the cluster is away" in (await api.get("/v1/pool?pool=why")).json()["summary"]
    await autoscaler.says("why", scaling=SCALING.model_copy(update={"stale": True}))
    assert "not scaling in" in (await api.get("/v1/pool?pool=why")).json()["summary"]
    problem(await api.get("/v1/pool?pool=nowhere"), 404, "not_found", "pool")


async def test_orders_reach_the_autoscaler_and_are_kept(
    api: httpx.AsyncClient, autoscaler: Autoscaler
) -> None:
    where = {"pool": "orders"}
    await autoscaler.says("orders")
    # The pool's first report creates its row.
    problem(await api.put("/v1/pool/override", params=where, json={"workers": 2}), 404, "not_found", "pool")
    assert (await autoscaler.reports("orders")).version == 0
    made = await api.put("/v1/pool/override", params=where, json={"workers": 2})
    assert (made.status_code, made.json()["override"], made.json()["version"]) == (200, 2, 1)
    await api.put("/v1/pool/dry-run", params=where, json={"dry_run": True})
    table = default_table().model_dump(mode="json")
    table["levels"][0]["target_utilization"] = 0.7
    assert (await api.put("/v1/pool/table", params=where, json=table)).status_code == 200
    told = await autoscaler.reports("orders")
    assert (told.version, told.override, told.dry_run) == (3, 2, True)
    assert told.table is not None
    assert told.table.levels[0].target_utilization == 0.7
    assert (await api.get("/v1/pool/orders", params=where)).json()["version"] == 3
    assert (await api.delete("/v1/pool/table", params=where)).json()["table"] is None
    back = (await api.put("/v1/pool/override", params=where, json={"workers": None})).json()
    assert (back["override"], back["dry_run"], back["version"]) == (None, True, 5)


async def test_bad_orders_name_the_field_and_change_nothing(
    api: httpx.AsyncClient, autoscaler: Autoscaler
) -> None:
    where = {"pool": "bad"}
    await autoscaler.says("bad")
    await autoscaler.reports("bad")
    for workers in (0, 5):
        refused = await api.put("/v1/pool/override", params=where, json={"workers": workers})
        assert problem(refused, 422, "invalid_input", "workers")["limit"] == "1 to 4"
    for body, field in (
        ({"workers": "3"}, "workers"),
        ({"workers": -1}, "workers"),
        ({}, "workers"),
        ({"workers": 2, "force": True}, "force"),
    ):
        problem(await api.put("/v1/pool/override", params=where, json=body), 422, "invalid_input", field)
    problem(
        await api.put("/v1/pool/dry-run", params=where, json={"dry_run": 1}), 422, "invalid_input", "dry_run"
    )
    gap = default_table().model_dump(mode="json")
    first_to = gap["levels"][0]["volatility_to"]
    gap["levels"][1]["volatility_from"] = 2 * first_to
    overlap = default_table().model_dump(mode="json")
    overlap["levels"][1]["volatility_from"] = first_to / 2
    closed = default_table().model_dump(mode="json")
    closed["levels"][-1]["volatility_to"] = 99.0
    for table, field, word in (
        (gap, "levels[1].volatility_from", "gap"),
        (overlap, "levels[1].volatility_from", "overlap"),
        (closed, f"levels[{len(closed['levels']) - 1}].volatility_to", "open"),
        ({"levels": [], "provenance": {"source": "x"}}, "levels", "at least one"),
        ({"levels": default_table().model_dump(mode="json")["levels"]}, "provenance", "required"),
    ):
        refused = await api.put("/v1/pool/table", params=where, json=table)
        assert word in problem(refused, 422, "invalid_input", field)["detail"]
    assert (await autoscaler.reports("bad")).version == 0
    await autoscaler.says("bad", scaling=None, target=None)
    refused = await api.put("/v1/pool/override", params=where, json={"workers": 1})
    problem(refused, 409, "pool_not_managed", "pool")


async def test_only_operators_give_orders_where_there_are_keys(pool: Any, autoscaler: Autoscaler) -> None:
    url = pool.gateway(
        "gateway-operators",
        DRAWN_KEY=KEY_A,
        TURBOSERVE_API_KEYS=f"{KEY_A}=acme,{KEY_B}=boss",
        TURBOSERVE_OPERATORS="boss",
    )
    await autoscaler.reports("keys")
    async with httpx.AsyncClient(base_url=url, timeout=120) as api:
        acme, boss = ({"Authorization": f"Bearer {key}"} for key in (KEY_A, KEY_B))
        autoscaler.api = api
        api.headers.update(acme)
        await autoscaler.says("keys")
        del api.headers["Authorization"]
        order = {"params": {"pool": "keys"}, "json": {"workers": 2}}
        problem(await api.put("/v1/pool/override", **order), 401, "unauthorized", "Authorization")
        refused = await api.put("/v1/pool/override", headers=acme, **order)
        problem(refused, 403, "not_an_operator", "tenant")
        correction = {"json": {"money": 1.0, "reason": "x"}}
        refused = await api.post("/v1/cost/corrections", headers=acme, **correction)
        problem(refused, 403, "not_an_operator", "tenant")
        made = await api.post("/v1/cost/corrections", headers=boss, **correction)
        assert (made.status_code, made.json()["by"]) == (201, "boss")
        listed = [(await api.get("/v1/cost", headers=who)).json()["corrections"] for who in (acme, boss)]
        assert [len(one) > 0 for one in listed] == [False, True]
        assert (await api.get("/v1/pool?pool=keys", headers=acme)).status_code == 200
        assert (await api.put("/v1/pool/override", headers=boss, **order)).status_code == 200
    pool.stop("gateway-operators")


async def test_a_session_costs_its_share_of_its_workers_time(api, start) -> None:  # type: ignore[no-untyped-def]
    session = await start()
    mine: dict[str, Any] = {}
    deadline = time.monotonic() + 120
    while not mine.get("gpu_seconds") and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        [mine] = (await api.get("/v1/cost", params={"session": session["id"]})).json()["sessions"]
    assert (mine["session"], mine["model"]) == (session["id"], "toyworld")
    assert mine["gpu_seconds"] > 0
    whole = (await api.get("/v1/cost")).json()
    assert whole["total"]["gpu_seconds"] >= whole["used"]["gpu_seconds"] >= mine["gpu_seconds"]
    assert whole["currency"] == "USD"
    assert session["id"] in [one["session"] for one in whole["sessions"]]
    problem(await api.get("/v1/cost?session=ses_none"), 404, "session_not_found", "session")
    problem(await api.get("/v1/cost?limit=0"), 422, "invalid_input", "limit")


async def test_only_operators_correct_the_cost(  # type: ignore[no-untyped-def]
    api, start, autoscaler: Autoscaler
) -> None:
    session = await start()
    await autoscaler.reports("paid", Rental(worker="wk_paid", age_s=500.0))
    before = (await api.get("/v1/cost")).json()["corrected"]
    body = {"gpu_seconds": -100.5, "reason": "the clock was wrong", "id": "cor_edge"}
    made = await api.post("/v1/cost/corrections", json=body)
    assert made.status_code == 201
    assert (made.json()["gpu_seconds"], made.json()["by"]) == (-100.5, "default")
    assert (await api.post("/v1/cost/corrections", json=body)).json() == made.json()
    gift = {"money": 2, "reason": "a gift", "session": session["id"]}
    assert (await api.post("/v1/cost/corrections", json=gift)).status_code == 201
    report = (await api.get("/v1/cost", params={"session": session["id"]})).json()
    assert report["corrected"]["gpu_seconds"] == before["gpu_seconds"] - 100.5
    assert report["corrected"]["money"] == before["money"] + 2.0
    assert [one["reason"] for one in report["corrections"][:2]] == ["a gift", "the clock was wrong"]
    assert report["sessions"][0]["corrected_money"] == 2.0
    for wrong, field in (
        ({"gpu_seconds": 1.0}, "reason"),
        ({"gpu_seconds": 1.0, "reason": " "}, "reason"),
        ({"gpu_seconds": 1.0, "reason": "a\0b"}, "reason"),
        ({"gpu_seconds": 1.0, "reason": "x" * 501}, "reason"),
        ({"gpu_seconds": 1e13, "reason": "x"}, "gpu_seconds"),
        ({"gpu_seconds": "1", "reason": "x"}, "gpu_seconds"),
        ({"money": -1e9, "reason": "x"}, "money"),
        ({"money": 1.0, "reason": "x", "session": "a b"}, "session"),
    ):
        problem(await api.post("/v1/cost/corrections", json=wrong), 422, "invalid_input", field)
    nothing = await api.post("/v1/cost/corrections", json={"reason": "x"})
    assert nothing.status_code == 422
    lone = await api.post(
        "/v1/cost/corrections",
        content=b'{"money": 1, "reason": "\\ud800"}',
        headers={"content-type": "application/json"},
    )
    assert lone.status_code == 422
    other = {"money": 3, "reason": "x", "id": "cor_edge"}
    problem(await api.post("/v1/cost/corrections", json=other), 409, "conflict", "id")


async def test_texts_of_a_table_that_cannot_be_stored_are_named(autoscaler: Autoscaler) -> None:
    """Incident: NUL or half of a surrogate pair in `provenance.source` was answered 500."""
    await autoscaler.says("texts")
    await autoscaler.reports("texts")
    where = {"pool": "texts"}
    before = (await autoscaler.api.get("/v1/pool/orders", params=where)).json()
    for broken in ("\0", "a\0b", "\ud800", "a\udfffb"):
        for path in ("source", "command", "controller"):
            table = default_table().model_dump(mode="json")
            table["provenance"][path] = {broken: 1.0} if path == "controller" else broken
            refused = await autoscaler.api.put(
                "/v1/pool/table",
                params=where,
                content=json.dumps(table),
                headers={"Content-Type": "application/json"},
            )
            problem(refused, 422, "invalid_input", f"provenance.{path}")
    assert (await autoscaler.api.get("/v1/pool/orders", params=where)).json() == before

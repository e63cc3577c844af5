"""Pools over HTTP, with the reports of several autoscalers over the broker."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime
from functools import partial
from typing import Any

import httpx
import pytest

from tests.helpers.pool_harness import Pool
from tests.helpers.problem import problem
from tests.helpers.reporting_autoscaler import LIMIT_S, SCALING, ReportingAutoscaler
from turboserve import subjects
from turboserve.autoscaler.control.policy import default_table
from turboserve.contracts.autoscale import ProfileTable, ScalingRecord
from turboserve.contracts.decoding import DecodeNeed
from turboserve.contracts.pool import PoolAction, PoolMemberPhase, PoolMemberStatus, PoolStatus

KEY_A, KEY_B = "key-of-acme-0123456789", "key-of-boss-0123456789"


def profile() -> dict[str, Any]:
    """Return the default profile in the form of the API."""
    found: dict[str, Any] = json.loads(default_table().to_file())
    return found


async def summary(api: httpx.AsyncClient, pool: str) -> str:
    text: str = (await api.get(f"/v1/pools/{pool}")).json()["summary"]
    return text


async def test_a_pool_explains_its_size(api: httpx.AsyncClient, autoscaler: ReportingAutoscaler) -> None:
    before = time.monotonic()
    await autoscaler.publish("why", start_up_s=3.5)
    found = (await api.get("/v1/pools/why")).json()
    assert (found["id"], found["target"], found["start_up_s"]) == ("why", 1, 3.5)
    assert (found["scaling"]["level"], found["scaling"]["target_utilization"]) == (1, 0.8)
    assert found["scaling"]["basis"] == "profile"
    assert 0 <= found["age_s"] <= time.monotonic() - before
    assert found["summary"] == "1 worker. No reason to change the size."
    for status, expected in (
        (
            {"reason": "why-0: launch: no"},
            "Why-0: launch: no.",
        ),
        ({"provider_error": "the cluster is away", "reason": "x"}, "Provider error: the cluster is away."),
        ({"orders": None}, "Waiting for the stored override; pool size unchanged."),
        ({"scaling": None, "ready": 2}, "2 workers, started by another system."),
    ):
        await autoscaler.publish("why", **status)
        assert await summary(api, "why") == expected
    out = ScalingRecord(at=1.0, action="out", target=3, previous=2, advice=3, reason="peak load 0.95")
    need = DecodeNeed(workers=1, sessions=12, needed=3, limits=True)
    enough = need.model_copy(update={"needed": 1})
    for changes, expected in (
        ({"stale": True}, "No load report yet; not scaling in."),
        ({"stale": True, "feedback_age_s": 30.0}, "No recent load report; not scaling in."),
        ({"mode": "override", "target": 3}, "Override: 3 workers. The controller wants 1."),
        ({"mode": "dry_run"}, "Dry run: 1 worker. The controller wants 1."),
        ({"most": 1}, "1 worker. The pool has a fixed size."),
        ({"target": 3, "decisions": (out,)}, "3 workers. Last change, 2 → 3: peak load 0.95."),
        ({"decoding": enough}, "1 worker. No reason to change the size."),
        ({"decoding": need}, "1 worker. Decode workers are the limit: 3 are needed, and 1 known."),
    ):
        await autoscaler.publish("why", scaling=SCALING.model_copy(update=changes))
        assert await summary(api, "why") == expected
    await autoscaler.publish("why", scaling=SCALING.model_copy(update={"decoding": need}))
    answer = (await api.get("/v1/pools/why")).json()["scaling"]["decoding"]
    assert answer == {"workers": 1, "sessions": 12, "needed": 3, "limits": True}
    draining = PoolMemberStatus(member="why-1", phase=PoolMemberPhase.DRAINING, sessions=2, suspended=1)
    await autoscaler.publish("why", members=(draining,), draining=1)
    assert await summary(api, "why") == "1 worker is draining; 3 sessions must migrate first."


async def test_an_unknown_pool_is_answered_with_the_known_ids(
    api: httpx.AsyncClient, autoscaler: ReportingAutoscaler
) -> None:
    await autoscaler.publish("known_1")
    await autoscaler.publish("known_2")
    deadline = time.monotonic() + LIMIT_S
    # A gateway that has just started expects reports of further pools.
    while (answer := await api.get("/v1/pools/nowhere")).status_code == 503:
        assert answer.json()["retry_after_s"] > 0
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    for method, path, body in (
        ("GET", "", None),
        ("GET", "/orders", None),
        ("PUT", "/override", {"workers": 2}),
        ("DELETE", "/override", None),
        ("PUT", "/dry-run", {"dry_run": True}),
        ("DELETE", "/dry-run", None),
        ("PUT", "/profile", profile()),
        ("DELETE", "/profile", None),
    ):
        answer = await api.request(method, f"/v1/pools/nowhere{path}", json=body)
        detail = problem(answer, 404, "pool_not_found", "pool")["detail"]
        known = detail.removeprefix("There is no pool nowhere. Known pools: ").rstrip(".").split(", ")
        assert {"known_1", "known_2"} <= set(known)
    for path in ("/v1/pool", "/v1/pool/orders", "/v1/pool/override", "/v1/pool?pool=known_1"):
        problem(await api.get(path), 404, "not_found", "path")


async def test_orders_go_to_the_pool_in_the_path(
    api: httpx.AsyncClient, autoscaler: ReportingAutoscaler
) -> None:
    """Incident: an order without a name went to the pool that had reported last."""
    for pool in ("east", "west"):
        await autoscaler.report(pool)
        await autoscaler.publish(pool, ready=1 if pool == "east" else 2)
    listed = {one["id"]: one for one in (await api.get("/v1/pools")).json()["pools"]}
    assert [listed[pool]["ready"] for pool in ("east", "west")] == [1, 2]
    assert list(listed) == sorted(listed)

    # The other pool reports last before each order.
    await autoscaler.publish("west")
    made = (await api.put("/v1/pools/east/override", json={"workers": 2})).json()
    assert (made["pool"], made["override"], made["version"]) == ("east", 2, 1)
    await autoscaler.publish("east")
    made = (await api.put("/v1/pools/west/dry-run", json={"dry_run": True})).json()
    assert (made["pool"], made["dry_run"], made["override"], made["version"]) == ("west", True, None, 1)
    east, west = [await autoscaler.report(pool) for pool in ("east", "west")]
    assert (east.version, east.override, east.dry_run) == (1, 2, None)
    assert (west.version, west.override, west.dry_run) == (1, None, True)

    await autoscaler.publish("west")
    assert (await api.put("/v1/pools/east/profile", json=profile())).status_code == 200
    await autoscaler.publish("east")
    assert (await api.delete("/v1/pools/west/override")).json()["version"] == 2
    east, west = [await autoscaler.report(pool) for pool in ("east", "west")]
    assert (east.override, east.table) == (2, ProfileTable.model_validate(profile()))
    assert (west.override, west.table) == (None, None)


async def test_a_report_under_another_pools_subject_is_dropped(
    api: httpx.AsyncClient, autoscaler: ReportingAutoscaler
) -> None:
    await autoscaler.publish("honest", ready=1)
    forged = PoolStatus(pool="honest", provider="local", ready=9, at=1.0)
    await autoscaler.bus.publish(subjects.POOL, "liar", forged)
    # One connection, one order: the gateway receives the forged report before this one.
    await autoscaler.publish("after_forged")
    assert (await api.get("/v1/pools/honest")).json()["ready"] == 1
    assert "liar" not in [one["id"] for one in (await api.get("/v1/pools")).json()["pools"]]


async def test_orders_reach_the_autoscaler_and_are_kept(
    api: httpx.AsyncClient, autoscaler: ReportingAutoscaler
) -> None:
    base = "/v1/pools/orders"
    await autoscaler.publish("orders")
    # The pool's first report to the state store creates its row.
    waiting = problem(await api.put(f"{base}/override", json={"workers": 2}), 503, "unavailable", "pool")
    assert waiting["retry_after_s"] > 0
    assert (await autoscaler.report("orders")).version == 0
    made = await api.put(f"{base}/override", json={"workers": 2})
    assert (made.status_code, made.json()["override"], made.json()["version"]) == (200, 2, 1)
    await api.put(f"{base}/dry-run", json={"dry_run": True})
    changed = profile()
    changed["levels"][0]["target_utilization"] = 0.7
    changed["provenance"]["made_at"] = "2026-11-22T22:04:05+01:00"
    kept = (await api.put(f"{base}/profile", json=changed)).json()["profile"]
    assert kept["provenance"]["made_at"] == "2026-11-22T21:04:05.000000Z"
    orders = await autoscaler.report("orders")
    assert (orders.version, orders.override, orders.dry_run) == (3, 2, True)
    assert orders.table is not None
    assert orders.table.levels[0].target_utilization == 0.7
    assert orders.table.provenance.made_at == datetime(2026, 11, 22, 21, 4, 5, tzinfo=UTC).timestamp()
    read = (await api.get(f"{base}/orders")).json()
    assert (read["version"], read["profile"]) == (3, kept)
    # The profile in an answer is one that may be sent.
    assert (await api.put(f"{base}/profile", json=read["profile"])).json()["profile"] == kept
    assert (await api.delete(f"{base}/profile")).json()["profile"] is None
    back = (await api.delete(f"{base}/override")).json()
    assert (back["override"], back["dry_run"], back["version"]) == (None, True, 6)
    assert (await api.delete(f"{base}/dry-run")).json()["dry_run"] is None


async def test_bad_orders_name_the_field_and_change_nothing(
    api: httpx.AsyncClient, autoscaler: ReportingAutoscaler
) -> None:
    base = "/v1/pools/bad"
    await autoscaler.publish("bad")
    await autoscaler.report("bad")
    for workers, limit in ((0, "1"), (5, "4")):
        refused = await api.put(f"{base}/override", json={"workers": workers})
        assert str(problem(refused, 422, "invalid_input", "workers")["limit"]) == limit
    for path, body, field in (
        ("override", {"workers": "3"}, "workers"),
        ("override", {"workers": -1}, "workers"),
        ("override", {"workers": None}, "workers"),
        ("override", {}, "workers"),
        ("override", {"workers": 2, "force": True}, "force"),
        ("dry-run", {"dry_run": 1}, "dry_run"),
        ("dry-run", {"dry_run": True, "pool": "east"}, "pool"),
    ):
        problem(await api.put(f"{base}/{path}", json=body), 422, "invalid_input", field)
    first_to = profile()["levels"][0]["volatility_to"]
    last = len(profile()["levels"]) - 1
    edits: tuple[tuple[tuple[str | int, ...], object, str, str], ...] = (
        (("levels", 1, "volatility_from"), 2 * first_to, "levels.1.volatility_from", "gap"),
        (("levels", 1, "volatility_from"), first_to / 2, "levels.1.volatility_from", "overlap"),
        (("levels", last, "volatility_to"), 99.0, f"levels.{last}.volatility_to", "open"),
        (("levels",), [], "levels", "at least one"),
        (("levels", 0, "target_utilisation"), 0.5, "levels.0.target_utilisation", "not permitted"),
        (("provenance", "made_by"), "x", "provenance.made_by", "not permitted"),
        (("provenance", "made_at"), 1.7e9, "provenance.made_at", "RFC 3339"),
        (("provenance", "made_at"), "2026-11-22", "provenance.made_at", "RFC 3339"),
        (("provenance", "made_at"), "1969-12-31T23:59:59Z", "provenance.made_at", "1970"),
        (("provenance", "made_at"), "2026-02-30T00:00:00Z", "provenance.made_at", "day"),
        (("tables",), [], "tables", "not permitted"),
    )
    for parts, value, field, word in edits:
        edited = profile()
        inner: Any = edited
        for part in parts[:-1]:
            inner = inner[part]
        inner[parts[-1]] = value
        refused = await api.put(f"{base}/profile", json=edited)
        assert word in problem(refused, 422, "invalid_input", field)["detail"]
    refused = await api.put(f"{base}/profile", json={"levels": profile()["levels"]})
    problem(refused, 422, "invalid_input", "provenance")
    assert (await autoscaler.report("bad")).version == 0
    await autoscaler.publish("bad", scaling=None, target=None)
    problem(await api.put(f"{base}/override", json={"workers": 1}), 409, "pool_not_managed", "pool")


async def test_only_operators_give_orders_and_read_reasons_where_there_are_keys(
    pool: Pool, autoscaler: ReportingAutoscaler
) -> None:
    url = pool.gateway(
        "gateway-operators",
        DRAWN_KEY=KEY_A,
        TURBOSERVE_API_KEYS=f"{KEY_A}=acme,{KEY_B}=boss",
        TURBOSERVE_OPERATORS="boss",
    )
    await autoscaler.report("keys")
    async with httpx.AsyncClient(base_url=url, timeout=120) as api:
        acme, boss = ({"Authorization": f"Bearer {key}"} for key in (KEY_A, KEY_B))
        autoscaler.api = api
        api.headers.update(acme)
        secret = "/opt/worker: no such file"
        member = PoolMemberStatus(
            member="keys-0",
            phase=PoolMemberPhase.BACKING_OFF,
            pid=4_242,
            reason=secret,
            models=("one", "two"),
        )
        action = PoolAction(at=1.0, member="keys-0", action="fail", reason=secret)
        status: dict[str, Any] = {"members": (member,), "actions": (action,), "reason": secret}
        await autoscaler.publish("keys", **status, provider_error=secret)
        del api.headers["Authorization"]
        for path in ("/v1/pools", "/v1/pools/keys"):
            texts = [(await api.get(path, headers=who)).text for who in (acme, boss)]
            assert [secret in text for text in texts] == [False, True]
            assert not any("4242" in text or "pid" in text for text in texts)
        seen = (await api.get("/v1/pools/keys", headers=acme)).json()
        assert seen["summary"] == "The provider reports an error."
        assert [seen["members"][0]["reason"], seen["actions"][0]["reason"]] == [None, None]
        assert seen["members"][0]["models"] == ["one", "two"]
        api.headers.update(acme)
        await autoscaler.publish("keys", **status)
        del api.headers["Authorization"]
        seen = (await api.get("/v1/pools/keys", headers=acme)).json()
        assert seen["summary"] == "The pool is not as wanted yet."

        order = partial(api.put, "/v1/pools/keys/override", json={"workers": 2})
        problem(await order(), 401, "unauthorized", "Authorization")
        problem(await order(headers=acme), 403, "missing_scope", "scope")
        correct = partial(api.post, "/v1/cost/corrections", json={"money": 1.0, "reason": "x"})
        refused = await correct(headers=acme)
        problem(refused, 403, "missing_scope", "scope")
        made = await correct(headers=boss)
        assert (made.status_code, made.json()["by"]) == (201, "boss")
        listed = [(await api.get("/v1/cost", headers=who)).json()["corrections"] for who in (acme, boss)]
        assert [len(one) > 0 for one in listed] == [False, True]
        assert (await order(headers=boss)).status_code == 200
    pool.stop("gateway-operators")


async def test_texts_of_a_profile_that_cannot_be_stored_are_named(autoscaler: ReportingAutoscaler) -> None:
    """Incident: NUL or half of a surrogate pair in `provenance.source` was answered 500."""
    await autoscaler.publish("texts")
    await autoscaler.report("texts")
    before = (await autoscaler.api.get("/v1/pools/texts/orders")).json()
    for broken in ("\0", "a\0b", "\ud800", "a\udfffb"):
        for path in ("source", "command", "controller"):
            body = profile()
            body["provenance"][path] = {broken: 1.0} if path == "controller" else broken
            refused = await autoscaler.api.put(
                "/v1/pools/texts/profile",
                content=json.dumps(body),
                headers={"Content-Type": "application/json"},
            )
            problem(refused, 422, "invalid_input", f"provenance.{path}")
    assert (await autoscaler.api.get("/v1/pools/texts/orders")).json() == before


@pytest.mark.parametrize("seconds", [0.0, 1e300])
async def test_any_time_of_a_report_can_be_written(
    api: httpx.AsyncClient, autoscaler: ReportingAutoscaler, seconds: float
) -> None:
    action = PoolAction(at=seconds, action="launch", reason="x")
    await autoscaler.publish("times", actions=(action,))
    [found] = (await api.get("/v1/pools/times")).json()["actions"]
    assert found["at"] == ("1970-01-01T00:00:00.000000Z" if seconds == 0 else "9999-12-31T23:59:59.999999Z")

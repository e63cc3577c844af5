"""Two pools at the same time: two autoscalers, one state store, and a gateway that serves both."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.service_process import LIMIT_S, Service
from tests.helpers.waiting import eventually
from turboserve.autoscaler.control.policy import default_table
from turboserve.cli.embedded import NatsServer
from turboserve.free_ports import any_free

PATIENT_S = 60.0


@pytest.fixture
async def api(nats_server: NatsServer, store: Service, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a real gateway."""
    port = any_free()
    gateway = Service(
        "gateway",
        "turboserve.gateway",
        nats_server,
        tmp_path / "gateway.log",
        TURBOSERVE_GATEWAY_PORT=str(port),
        TURBOSERVE_REQUEST_DEADLINE_S=str(PATIENT_S),
    )
    gateway.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=2 * PATIENT_S) as client:

        async def is_up() -> bool:
            with suppress(httpx.HTTPError):
                return (await client.get("/healthz")).status_code == 200
            return False

        await eventually(is_up)
        yield client
    await asyncio.to_thread(gateway.end)
    print(gateway.logged())


async def until(api: httpx.AsyncClient, pool: str, **wanted: object) -> dict[str, Any]:
    """Wait until the pool's status has these values. Returns the status."""
    deadline = time.monotonic() + LIMIT_S
    seen: dict[str, Any] = {}
    while time.monotonic() < deadline:
        answer = await api.get(f"/v1/pools/{pool}")
        seen = answer.json()
        if answer.status_code == 200 and wanted.items() <= seen.items():
            return seen
        await asyncio.sleep(0.1)
    raise AssertionError(f"pool {pool} does not reach {wanted}: {seen}")


async def order(api: httpx.AsyncClient, method: str, path: str, body: object = None) -> dict[str, Any]:
    answer = await api.request(method, f"/v1/pools/{path}", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_each_pool_has_its_orders_its_workers_and_its_cost(
    two_autoscalers: Any, api: httpx.AsyncClient
) -> None:
    for autoscaler in two_autoscalers:
        autoscaler.variables |= {
            "TURBOSERVE_POOL_MIN": "1",
            "TURBOSERVE_POOL_MAX": "3",
            # Only then the orders' profile is in force.
            "TURBOSERVE_SCALE_HEADROOM": "profiled",
        }
        autoscaler.start()
    one, two = [autoscaler.name for autoscaler in two_autoscalers]
    for pool in (one, two):
        await until(api, pool, ready=1, target=1, orders_version=0)
    listed = [found["id"] for found in (await api.get("/v1/pools")).json()["pools"]]
    assert [pool for pool in listed if pool in (one, two)] == sorted((one, two))

    # Each order reaches its pool, and the other one keeps its size, its mode and its version.
    assert (await order(api, "PUT", f"{one}/override", {"workers": 2}))["version"] == 1
    seen = await until(api, one, ready=2, target=2, orders_version=1)
    assert (seen["scaling"]["mode"], seen["scaling"]["override"]) == ("override", 2)
    assert (await order(api, "PUT", f"{two}/dry-run", {"dry_run": True}))["version"] == 1
    seen = await until(api, two, ready=1, target=1, orders_version=1)
    assert (seen["scaling"]["mode"], seen["scaling"]["override"]) == ("dry_run", None)
    profile = json.loads(default_table().to_file())
    profile["provenance"]["source"] = "a test"
    await order(api, "PUT", f"{two}/profile", profile)
    seen = await until(api, two, orders_version=2)
    assert seen["scaling"]["profile"]["source"] == "a test"
    other = await until(api, one, ready=2, orders_version=1)
    assert other["scaling"]["mode"] == "override"
    assert other["scaling"]["profile"]["source"] == default_table().provenance.source

    # A pool lists its own members alone, although the store's list has the workers of both.
    for pool, count in ((one, 2), (two, 1)):
        members = (await until(api, pool, ready=count))["members"]
        assert [member["member"] for member in members] == [f"{pool}-{i}" for i in range(count)]
        assert not any("pid" in member for member in members)

    # The orders of a restarted autoscaler are those of its pool.
    second = two_autoscalers[1]
    await asyncio.to_thread(second.end)
    second.start()
    # The gateway still has the last report of the process that was ended. The next one adopts its worker.
    deadline = time.monotonic() + LIMIT_S
    while "adopt" not in [action["action"] for action in seen["actions"]]:
        assert time.monotonic() < deadline, seen
        seen = await until(api, two, orders_version=2, ready=1)
        await asyncio.sleep(0.1)
    assert seen["scaling"]["mode"] == "dry_run"
    assert (await order(api, "DELETE", f"{one}/override"))["override"] is None
    await until(api, one, orders_version=2)
    assert (await order(api, "GET", f"{two}/orders"))["version"] == 2
    costs = {cost["pool"]: cost["gpu_seconds"] for cost in (await api.get("/v1/cost")).json()["pools"]}
    assert costs[one] > 0
    assert costs[two] > 0

"""A pool that shrinks to zero and grows again: the whole stack, with one session only."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx

from tests.helpers import patient_stack
from tests.helpers.tiny_workers import TINY_WORKERS
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack

LIMIT_S = 180.0


async def read(api: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """Return the answer; retries if the store has no time at the moment."""
    deadline = time.monotonic() + LIMIT_S
    while (answer := await api.get(path)).status_code >= 500 and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def until_pool(api: httpx.AsyncClient, **wanted: object) -> dict[str, Any]:
    """Wait until the pool's status has these numbers. Returns the status."""
    deadline = time.monotonic() + LIMIT_S
    found: dict[str, Any] = {}
    while time.monotonic() < deadline:
        answer = await api.get("/v1/pools/local")
        if answer.status_code == 200:
            found = answer.json()
            if all(found[name] == value for name, value in wanted.items()):
                return found
        await asyncio.sleep(0.2)
    raise AssertionError(f"the pool never came to {wanted}: {found}")


async def until_share(api: httpx.AsyncClient, session: str) -> None:
    """Wait until the session has a share of its worker's cost."""
    deadline = time.monotonic() + LIMIT_S
    while not (await read(api, f"/v1/cost?session={session}"))["sessions"][0]["gpu_seconds"]:
        assert time.monotonic() < deadline, "the session was never given a share"
        await asyncio.sleep(0.2)


async def test_a_session_wakes_a_pool_of_no_workers_and_is_paid_for(data_dir: Path) -> None:
    environment = {
        **patient_stack.PATIENT,
        **TINY_WORKERS,
        "TURBOSERVE_SCALE_ZERO_AFTER_S": "2",
        "TURBOSERVE_SCALE_IN_COOLDOWN_S": "2",
        "TURBOSERVE_SCALE_IN_WINDOW_S": "2",
        "TURBOSERVE_PRICES": '{"cpu": 3600}',
    }
    with BackgroundStack(data_dir, "--workers", "0..2", environment=environment) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=LIMIT_S) as api:
            await until_pool(api, target=0, ready=0, orders_version=0)
            assert (await read(api, "/v1/cost"))["total"]["gpu_seconds"] == 0

            # No worker serves the model or ever has: the session is admitted nevertheless, and waits.
            viewer = await Viewer.create(api, "a red circle moving left")
            async with viewer.watching():
                await viewer.more_chunks(8, LIMIT_S)
                # Shares are assigned by samples, two seconds apart.
                await until_share(api, viewer.session)
                pool = await until_pool(api, target=1, ready=1)
                wake = next(d for d in pool["scaling"]["decisions"] if d["action"] == "wake")
                assert (wake["previous"], wake["target"]) == (0, 1)
                assert pool["start_up_s"] > 0
            await viewer.delete()
            await until_pool(api, target=0, members=[])
            # The next report contains its end, and the last share is assigned. Then nothing is added.
            deadline = time.monotonic() + LIMIT_S
            total = None
            while total != (total := (await read(api, "/v1/cost"))["total"]):
                assert time.monotonic() < deadline, f"the cost still grows: {total}"
                await asyncio.sleep(5.0)

            cost = await read(api, f"/v1/cost?session={viewer.session}")
            [share] = cost["sessions"]
            assert 0 < share["gpu_seconds"] < cost["total"]["gpu_seconds"]
            assert share["money"] > 0
            # The time until the worker was ready is paid for, but by no session.
            [kind] = cost["kinds"]
            assert 0 < kind["starting_gpu_seconds"] <= cost["idle"]["gpu_seconds"] + 1e-6
            assert cost["total"] == total


POOL = """
[kinds.large]
price = 2.0
most = 1
settings = { TURBOSERVE_WORKER_MAX_SESSIONS = "2" }

[kinds.small]
price = 1.0
most = 1
settings = { TURBOSERVE_WORKER_MAX_SESSIONS = "2" }

[[offers]]
name = "world"
kind = "large"
model = "toyworld"
least = 1

[[offers]]
name = "tiny"
kind = "small"
models = ["toyworld-small", "toyworld"]
"""


async def test_a_session_of_a_second_model_gets_a_worker_which_is_released_afterwards(
    data_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "pool.toml").write_text(POOL)
    environment = {
        **patient_stack.PATIENT,
        **TINY_WORKERS,
        "TURBOSERVE_SCALE_HORIZON_S": "1",
        "TURBOSERVE_SCALE_IN_COOLDOWN_S": "2",
        "TURBOSERVE_SCALE_PEAK_WINDOW_S": "4",
    }
    arguments = ("--pool", str(tmp_path / "pool.toml"))
    with BackgroundStack(data_dir, *arguments, environment=environment) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=LIMIT_S) as api:
            await until_pool(api, target=1, ready=1)
            # No worker serves the model or ever has.
            viewer = await Viewer.create(api, "a red circle moving left", model="toyworld-small")
            async with viewer.watching():
                await viewer.more_chunks(3, LIMIT_S)
                pool = await until_pool(api, target=2, ready=2)
                hired = next(one for one in pool["scaling"]["decisions"] if one["action"] == "out")
                assert hired["reason"].startswith("hire tiny: toyworld-small: 1 session, ")
                assert hired["numbers"]["workers tiny"] == 1
                workers = (await read(api, "/v1/workers"))["workers"]
                models = {one["id"]: [each["model"] for each in one["classes"]] for one in workers}
                members = {one["member"]: one["worker"] for one in pool["members"]}
                assert {name: models[worker] for name, worker in members.items()} == {
                    "local-world-0": ["toyworld"],
                    "local-tiny-0": ["toyworld-small", "toyworld"],
                }
                assert (await viewer.get())["worker"] == members["local-tiny-0"]

                # The next autoscaler finds the workers of each offer, and keeps them.
                stack.kill("autoscaler")
                deadline = time.monotonic() + LIMIT_S
                while any(one["action"] == "out" for one in pool["scaling"]["decisions"]):
                    assert time.monotonic() < deadline, "the autoscaler is not started again"
                    await asyncio.sleep(0.2)
                    pool = await until_pool(api, target=2, ready=2)
                assert {one["member"]: one["worker"] for one in pool["members"]} == members
                await viewer.more_chunks(3, LIMIT_S)
            await viewer.delete()
            pool = await until_pool(api, target=1, ready=1, draining=0)
            assert [one["member"] for one in pool["members"] if one["wanted"]] == ["local-world-0"]
            assert any(one["reason"].startswith("release tiny") for one in pool["scaling"]["decisions"])

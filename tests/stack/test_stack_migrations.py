"""A playing session migrates between two real workers: the video continues without loss or repetition."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from turboserve.bench.streaming.decode import decode
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack

pytestmark = pytest.mark.stack

FIRST_S = 120.0
MIGRATION_S = 120.0


async def ready_workers(api: httpx.AsyncClient, count: int, limit_s: float = FIRST_S) -> set[str]:
    """Wait until `count` workers are ready. Returns them."""
    deadline_s = time.monotonic() + limit_s
    while True:
        workers = (await api.get("/v1/workers")).json()["workers"]
        ready = {worker["id"] for worker in workers if worker["phase"] == "ready"}
        if len(ready) >= count:
            return ready
        assert time.monotonic() < deadline_s, f"{len(ready)} of {count} workers are ready"
        await asyncio.sleep(0.2)


async def migrate(api: httpx.AsyncClient, session: str, workers: set[str]) -> dict[str, Any]:
    """Request a migration to the other of two workers, with retries while the answer asks for them."""
    deadline_s = time.monotonic() + MIGRATION_S
    while True:
        row = (await api.get(f"/v1/sessions/{session}")).json()
        [target] = workers - {row["worker"]}
        answer = await api.post(f"/v1/sessions/{session}/migrate", json={"worker": target})
        body: dict[str, Any] = answer.json()
        # The scheduler may be migrating it there on its own, or for a request whose answer came too late.
        there = await api.get(f"/v1/sessions/{session}")
        if answer.status_code == 202:
            return body
        begun = answer.status_code == 409 and "already migrating" in body["detail"]
        assert "retry_after_s" in body or begun or there.json()["worker"] == target, body
        assert time.monotonic() < deadline_s, body
        await asyncio.sleep(body.get("retry_after_s", 0.1))


async def migrated(viewer: Viewer, target: str) -> None:
    """Wait until the session plays on `target`."""
    await viewer.event("session.migrated", MIGRATION_S, worker=target)
    before = len(viewer.chunks)
    await viewer.until(
        lambda: sum(chunk.worker == target for chunk in viewer.chunks[before:]) >= 2,
        MIGRATION_S,
        f"two chunks of {target}",
    )


async def test_a_playing_session_is_migrated_there_and_back(
    stack: BackgroundStack, api: httpx.AsyncClient, open_session: Any, read_log: Any
) -> None:
    workers = await ready_workers(api, 2)
    for _ in range(3):
        if await migrates_there_and_back(api, open_session, read_log, workers):
            return
    pytest.fail("sessions are migrated although no client asks for it")


async def migrates_there_and_back(
    api: httpx.AsyncClient, open_session: Any, read_log: Any, workers: set[str]
) -> bool:
    """Migrate a new session twice, and check what its viewer gets.

    Returns False if the scheduler of a busy machine has migrated it as well, for balance.
    """
    async with asyncio.TaskGroup() as watches:
        viewer = await open_session("a red circle moving left", seed=5)
        watches.create_task(viewer.watch())
        await viewer.until(lambda: len(viewer.chunks) >= 3, FIRST_S, "three chunks")
        begun = await migrate(api, viewer.session, workers)
        first, second, epoch = begun["worker"], begun["target"], begun["epoch"]
        assert {first, second} == workers
        await migrated(viewer, second)
        row = (await api.get(f"/v1/sessions/{viewer.session}")).json()
        back = await migrate(api, viewer.session, workers)
        await migrated(viewer, back["target"])
        await viewer.delete()
        await viewer.until(lambda: viewer.ended is not None, MIGRATION_S, "end of the stream")
    assert [chunk.index for chunk in viewer.chunks] == list(range(len(viewer.chunks)))
    assert (viewer.player.lost, viewer.player.repeated) == (0, 0)
    decisions = (await api.get(f"/v1/sessions/{viewer.session}/decisions")).json()["decisions"]
    if sum(one["kind"] == "migrate" and one["epoch"] >= epoch for one in decisions) > 2:
        return False
    assert (row["worker"], row["target"], row["epoch"]) == (second, None, epoch + 1)
    owners = list(dict.fromkeys((chunk.worker, chunk.epoch) for chunk in viewer.chunks))
    assert owners[-3:] == [(first, epoch), (second, epoch + 1), (first, epoch + 2)]
    assert [one for _, one in owners] == list(range(owners[0][1], epoch + 3))
    assert decode(viewer.video()).gaps() == []
    log = await read_log(viewer.session)
    assert [header.index for header, _ in log] == list(range(len(log)))
    kinds = [one["kind"] for one in decisions]
    assert [kind for kind in kinds if kind in ("migrate", "migrated")][-4:] == ["migrate", "migrated"] * 2
    done = next(one for one in decisions if one["kind"] == "migrated")
    assert done["numbers"]["bytes_copied"] > 0
    return True

"""Two workers serve two models each: sessions of both play, migrate, and survive the death of a worker."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.helpers import patient_stack
from tests.helpers.waiting import eventually
from tests.stack.test_stack_migrations import migrate, migrated, ready_workers
from turboserve.bench.streaming.decode import decode
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack

pytestmark = pytest.mark.stack

LARGE, SMALL = "toyworld-small", "paced"
SIZES = {LARGE: (64, 64), SMALL: (16, 16)}
LIMIT_S = 120.0


async def one_of_each_on_both(api: httpx.AsyncClient, viewers: Sequence[Viewer], workers: set[str]) -> None:
    """Migrate sessions, if placement has not done it, until each worker has one of each model."""
    for pair in (viewers[:2], viewers[2:]):
        first, second = [(await viewer.get())["worker"] for viewer in pair]
        if first == second:
            await migrate(api, pair[1].session, workers)
            [target] = workers - {first}
            await migrated(pair[1], target)


async def test_sessions_of_two_models_share_workers_migrate_and_outlive_one(tmp_path: Path) -> None:
    # Each worker carries four sessions of either model alone, so two of each.
    environment = {
        **patient_stack.PATIENT,
        "TURBOSERVE_WORKER_MAX_SESSIONS": "4",
        "TURBOSERVE_REBALANCE": "false",
    }
    arguments = ("--workers", "2", "--model", f"{LARGE},{SMALL}")
    with BackgroundStack(tmp_path / "data", *arguments, environment=environment) as stack:
        async with (
            httpx.AsyncClient(base_url=stack.url, timeout=60.0) as api,
            asyncio.TaskGroup() as watches,
        ):
            workers = await ready_workers(api, 2, LIMIT_S)
            models = {one["id"]: one for one in (await api.get("/v1/models")).json()["models"]}
            assert models.keys() == {LARGE, SMALL}
            for name, (width, height) in SIZES.items():
                [size] = models[name]["sizes"]
                assert (models[name]["workers"], models[name]["capacity"]) == (2, 8)
                assert (size["width"], size["height"]) == (width, height)
            assert [models[name]["default"] for name in (LARGE, SMALL)] == [True, False]
            viewers = [
                await Viewer.create(api, "a red circle moving left", keep_video=True, model=model, seed=seed)
                for model in (LARGE, SMALL)
                for seed in (1, 2)
            ]
            for viewer in viewers:
                watches.create_task(viewer.watch())
            for viewer in viewers:
                await viewer.more_chunks(2, LIMIT_S)
            await one_of_each_on_both(api, viewers, workers)

            async def counted() -> bool:
                models = {one["id"]: one for one in (await api.get("/v1/models")).json()["models"]}
                return [models[name]["sessions"] for name in (LARGE, SMALL)] == [2, 2]

            # Workers report how many sessions they have.
            await eventually(counted)
            await placed_by_shares(api, workers)

            # Each migrates to the other worker, live.
            for viewer in (viewers[0], viewers[2]):
                [target] = workers - {(await viewer.get())["worker"]}
                await migrate(api, viewer.session, workers)
                await migrated(viewer, target)
            await one_of_each_on_both(api, viewers, workers)

            owners = [(await viewer.get())["worker"] for viewer in viewers]
            assert Counter(owners[:2]) == Counter(owners[2:]) == Counter(dict.fromkeys(workers, 1))
            stack.kill("worker")
            deadline_s = time.monotonic() + LIMIT_S
            lost = await dead(api, workers, deadline_s)
            for viewer, owner in zip(viewers, owners, strict=True):
                if owner == lost:
                    await viewer.event("session.placed", deadline_s - time.monotonic(), previous_worker=lost)
                await viewer.more_chunks(3, deadline_s - time.monotonic())
            for viewer in viewers:
                await viewer.delete()
            for viewer in viewers:
                await viewer.until(lambda one=viewer: one.ended is not None, LIMIT_S, "end")  # type: ignore[misc]
    for viewer, model in zip(viewers, (LARGE, LARGE, SMALL, SMALL), strict=True):
        assert [chunk.index for chunk in viewer.chunks] == list(range(len(viewer.chunks)))
        assert (viewer.player.lost, viewer.player.repeated) == (0, 0)
        video = decode(viewer.video())
        width, height = SIZES[model]
        assert video.frames.shape[1:3] == (height, width)
        assert video.gaps() == []


async def placed_by_shares(api: httpx.AsyncClient, workers: set[str]) -> None:
    """Create sessions, one at a time, until one is placed by the shares of the two models. Ends each."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        # The first shares are solved after the solver has been imported.
        viewer = await Viewer.create(api, "a blue square moving right", model=SMALL, seed=9)
        while (await viewer.get())["worker"] is None:
            assert time.monotonic() < deadline_s, "a session beside four is not placed"
            await asyncio.sleep(0.1)
        listed = (await api.get(f"/v1/sessions/{viewer.session}/decisions")).json()["decisions"]
        await viewer.delete()
        decision = [one for one in listed if one["kind"] == "place"][-1]
        if "its quota has room" in decision["reason"]:
            assert decision["worker"] in workers
            assert 1 <= decision["numbers"]["quota"] <= 4
            return
        assert time.monotonic() < deadline_s, f"no session is placed by shares: {decision}"
        await asyncio.sleep(0.5)


async def dead(api: httpx.AsyncClient, workers: set[str], deadline_s: float) -> str:
    """Return the one of two workers that is declared gone."""
    while True:
        listed = (await api.get("/v1/workers")).json()["workers"]
        lost = workers - {one["id"] for one in listed if one["phase"] == "ready"}
        if len(lost) == 1:
            return lost.pop()
        assert time.monotonic() < deadline_s, "the killed worker is still taken for alive"
        await asyncio.sleep(0.2)

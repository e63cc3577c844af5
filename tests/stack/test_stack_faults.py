"""`kill -9` of any one service or server while sessions play: it comes back, and no session is lost."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import httpx
import pytest

from tests.stack.conftest import Open, ReadLog
from turboserve.bench.streaming.decode import decode
from turboserve.bench.streaming.rest import request
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack
from turboserve.experiments.chaos.simulated_clients import with_retry

pytestmark = pytest.mark.stack

FIRST_S = 60.0
BACK_S = 120.0
"""Time within which the victim serves again and every session continues."""
PROMPTS = ("a red circle moving left", "a blue square moving up", "a green triangle moving right")


async def watched(open_session: Open, watches: asyncio.TaskGroup) -> list[Viewer]:
    """Open three sessions that play. The group's tasks watch them until they end."""
    viewers = [await open_session(prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    for viewer in viewers:
        watches.create_task(viewer.watch())
    for viewer in viewers:
        await viewer.until(partial(has_chunks, viewer, 2), FIRST_S, "two chunks")
    return viewers


def has_chunks(viewer: Viewer, count: int) -> bool:
    return len(viewer.chunks) >= count


def has_ended(viewer: Viewer) -> bool:
    return viewer.ended is not None


async def check_whole(viewers: list[Viewer], read_log: ReadLog) -> None:
    """Check that each viewer's video has no gap and no repetition, can be played, and equals the log."""
    for viewer in viewers:
        assert [chunk.index for chunk in viewer.chunks] == list(range(len(viewer.chunks)))
        assert (viewer.player.lost, viewer.player.repeated) == (0, 0)
        assert decode(viewer.video()).gaps() == []
        log = await read_log(viewer.session)
        assert [header.index for header, _ in log] == list(range(len(log)))
        assert [header.epoch for header, _ in log] == sorted(header.epoch for header, _ in log)
        seen = [chunk.fragment for chunk in viewer.chunks]
        assert [payload[header.init_bytes :] for header, payload in log][: len(seen)] == seen


async def end_all(viewers: list[Viewer]) -> None:
    for viewer in viewers:
        await with_retry(viewer.delete)
    for viewer in viewers:
        await viewer.until(partial(has_ended, viewer), BACK_S, "end of the stream")


@pytest.mark.parametrize(
    "victims",
    [("gateway", "scheduler", "autoscaler", "state-store"), ("nats", "redis", "postgres")],
    ids=["services", "servers"],
)
async def test_sessions_play_on_after_each_kill(
    stack: BackgroundStack,
    api: httpx.AsyncClient,
    open_session: Open,
    read_log: ReadLog,
    victims: tuple[str, ...],
) -> None:
    async with asyncio.TaskGroup() as watches:
        viewers = await watched(open_session, watches)
        for victim in victims:
            killed = stack.kill(victim)
            deadline_s = time.monotonic() + BACK_S
            await asyncio.to_thread(stack.wait_until_back, victim, killed, BACK_S)
            for viewer in viewers:
                await viewer.more_chunks(3, deadline_s - time.monotonic())
            # Their workers lived, so the sessions were not reassigned after a death; they may have migrated.
            for viewer in viewers:
                path = f"/v1/sessions/{viewer.session}/decisions"
                answer = await with_retry(partial(request, api, "GET", path))
                kinds = {decision["kind"] for decision in answer["decisions"]}
                assert "place" in kinds, victim
                assert "recover" not in kinds, victim
        await end_all(viewers)
    await check_whole(viewers, read_log)


async def test_sessions_of_a_killed_worker_go_on_elsewhere(
    stack: BackgroundStack, api: httpx.AsyncClient, open_session: Open, read_log: ReadLog
) -> None:
    async with asyncio.TaskGroup() as watches:
        viewers = await watched(open_session, watches)
        await use_both_workers(api, viewers)
        owners = [viewer.chunks[-1].worker for viewer in viewers]
        seen = [len(viewer.chunks) for viewer in viewers]
        stack.kill("worker")
        deadline_s = time.monotonic() + BACK_S
        lived = await surviving_worker(api, set(owners), deadline_s)
        for viewer, owner in zip(viewers, owners, strict=True):
            wanted = 3 if owner == lived else 1
            await viewer.more_chunks(wanted, deadline_s - time.monotonic())
        for viewer, owner, before in zip(viewers, owners, seen, strict=True):
            if owner != lived:
                await viewer.until(
                    partial(three_of_another, viewer, owner),
                    deadline_s - time.monotonic(),
                    "three chunks of another worker",
                )
                await viewer.event("session.placed", deadline_s - time.monotonic(), previous_worker=owner)
            else:
                assert {chunk.worker for chunk in viewer.chunks[before : before + 3]} == {owner}
        await end_all(viewers)
    await check_whole(viewers, read_log)
    # The pool is filled up again.
    deadline_s = time.monotonic() + BACK_S
    while len(await living_workers(api)) < 2:
        assert time.monotonic() < deadline_s, "no second worker again"
        await asyncio.sleep(0.2)


async def use_both_workers(api: httpx.AsyncClient, viewers: list[Viewer]) -> None:
    """Migrate a session by hand if placement has put all on one worker, because the other is slower."""
    owners = {viewer.chunks[-1].worker for viewer in viewers}
    if len(owners) == 2:
        return
    [other] = await living_workers(api) - owners
    path = f"/v1/sessions/{viewers[-1].session}/migrate"
    await with_retry(lambda: request(api, "POST", path, json={"worker": other}))
    await viewers[-1].until(
        lambda: viewers[-1].chunks[-1].worker == other, BACK_S, "a chunk of the other worker"
    )


async def living_workers(api: httpx.AsyncClient) -> set[str]:
    workers = (await api.get("/v1/workers")).json()["workers"]
    return {worker["id"] for worker in workers if worker["phase"] == "ready"}


def three_of_another(viewer: Viewer, owner: str) -> bool:
    """Return whether the newest three chunks come from another worker than `owner`."""
    return [chunk.worker != owner for chunk in viewer.chunks[-3:]] == [True] * 3


async def surviving_worker(api: httpx.AsyncClient, owners: set[str], deadline_s: float) -> str:
    """Return the one of the two `owners` that is not declared gone."""
    while True:
        left = owners & await living_workers(api)
        if len(left) == 1:
            return left.pop()
        assert time.monotonic() < deadline_s, "the killed worker is still taken for alive"
        await asyncio.sleep(0.1)

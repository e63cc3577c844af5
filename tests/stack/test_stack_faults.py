"""`kill -9` of any one service or server while sessions play: it comes back, and no session is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial

import httpx
import pytest

from tests.helpers.patient_stack import PATIENT
from tests.helpers.tiny_workers import TINY_WORKERS
from tests.helpers.waiting import eventually
from tests.stack.conftest import Open, ReadLog
from turboserve.bench.streaming.decode import decode
from turboserve.bench.streaming.rest import request
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack
from turboserve.experiments.chaos.simulated_clients import with_retry
from turboserve.state_store.periodic_writes import VIEWERS_S

pytestmark = pytest.mark.stack

FIRST_S = 120.0
BACK_S = 120.0
"""Time within which the victim serves again and every session continues."""
USED = "gpu_seconds", "chunks", "video_seconds", "delivered_bytes"
PROMPTS = ("a red circle moving left", "a blue square moving up", "a green triangle moving right")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundStack]:
    """A stack of these tests alone, which kill its processes."""
    environment = {
        **PATIENT,
        **TINY_WORKERS,
        "TURBOSERVE_WORKER_MAX_SESSIONS": "4",
        # Logs are compared from their first chunk on, also after minutes.
        "TURBOSERVE_CHUNKS_KEPT": "2000",
    }
    data = tmp_path_factory.mktemp("stack") / "data"
    with BackgroundStack(data, "--workers", "2", environment=environment) as stack:
        yield stack


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


async def usage_of_all(api: httpx.AsyncClient) -> dict[str, float]:
    """Return the sums of all days and keys."""
    answer = await with_retry(partial(request, api, "GET", "/v1/usage?group_by=tenant"))
    entries: list[dict[str, float]] = answer["usage"]
    return {name: sum(entry[name] for entry in entries) for name in USED}


async def usage_at_rest(api: httpx.AsyncClient) -> dict[str, float]:
    """Return the sums when what viewers of ended sessions have used is written.

    Services of a busy machine may write it later than after one interval.
    """
    last, found = None, await usage_of_all(api)
    async with asyncio.timeout(BACK_S):
        while found != last:
            await asyncio.sleep(VIEWERS_S + 1.0)
            last, found = found, await usage_of_all(api)
    return found


async def check_usage(
    api: httpx.AsyncClient,
    viewers: list[Viewer],
    read_log: ReadLog,
    before: dict[str, float],
    elapsed_s: float,
    kills: int,
) -> None:
    """Check that the log's chunks and seconds are counted once, GPU time once, and bytes never twice.

    The caller has waited for `bytes_are_counted`.
    """
    headers = [header for viewer in viewers for header, _ in await read_log(viewer.session)]

    async def counted() -> bool:
        return (await usage_of_all(api))["chunks"] - before["chunks"] >= len(headers)

    await eventually(counted)
    after = await usage_at_rest(api)
    used = {name: after[name] - before[name] for name in USED}
    assert used["chunks"] == len(headers)
    assert used["video_seconds"] == pytest.approx(sum(header.frames / header.fps for header in headers))
    costs = await with_retry(partial(request, api, "GET", "/v1/cost?limit=500"))
    ours = {viewer.session for viewer in viewers}
    shares = sum(each["gpu_seconds"] for each in costs["sessions"] if each["session"] in ours)
    assert used["gpu_seconds"] == pytest.approx(shares, abs=1e-3)
    # Two workers at a time, and a third that replaces one of them.
    assert 0.5 * elapsed_s < used["gpu_seconds"] < 3 * elapsed_s
    received = received_bytes(viewers)
    # What a gateway sent and no viewer received is counted, what it or a state store had not written is not.
    sent_again = kills * len(viewers) * max(received)
    assert 0.2 * sum(received) < used["delivered_bytes"] <= sum(received) + sent_again


def received_bytes(viewers: list[Viewer]) -> list[int]:
    return [len(chunk.fragment) for viewer in viewers for chunk in viewer.chunks]


async def bytes_are_counted(api: httpx.AsyncClient, viewers: list[Viewer], before: dict[str, float]) -> None:
    """Wait until a part of the bytes is counted: kills that follow fast may each lose all that was not."""

    async def counted() -> bool:
        used = (await usage_of_all(api))["delivered_bytes"] - before["delivered_bytes"]
        return used > 0.25 * sum(received_bytes(viewers))

    await eventually(counted, BACK_S)


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
    # The test before has waited until its usage was written.
    used_before, began = await usage_of_all(api), time.monotonic()
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
                kinds = await decided(api, viewer)
                assert "place" in kinds, victim
                assert "recover" not in kinds, victim
        await bytes_are_counted(api, viewers, used_before)
        await end_all(viewers)
    await check_whole(viewers, read_log)
    await check_usage(api, viewers, read_log, used_before, time.monotonic() - began, kills=len(victims))


async def test_sessions_of_a_killed_worker_go_on_elsewhere(
    stack: BackgroundStack, api: httpx.AsyncClient, open_session: Open, read_log: ReadLog
) -> None:
    used_before, began = await usage_of_all(api), time.monotonic()
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
                # Only a migration takes it away: when the new worker is ready early, or to the worker that is
                # killed, from which it recovers.
                makers = {chunk.worker for chunk in viewer.chunks[before : before + 3]}
                kinds = await decided(api, viewer)
                assert (makers == {owner} and "recover" not in kinds) or "migrate" in kinds
        await bytes_are_counted(api, viewers, used_before)
        await end_all(viewers)
    await check_whole(viewers, read_log)
    await check_usage(api, viewers, read_log, used_before, time.monotonic() - began, kills=1)
    # The pool is filled up again.
    deadline_s = time.monotonic() + BACK_S
    while len(await living_workers(api)) < 2:
        assert time.monotonic() < deadline_s, "no second worker again"
        await asyncio.sleep(0.2)


async def decided(api: httpx.AsyncClient, viewer: Viewer) -> set[str]:
    """Return the kinds of the decisions about a session."""
    path = f"/v1/sessions/{viewer.session}/decisions"
    answer = await with_retry(partial(request, api, "GET", path))
    return {decision["kind"] for decision in answer["decisions"]}


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
    workers = (await with_retry(partial(request, api, "GET", "/v1/workers")))["workers"]
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

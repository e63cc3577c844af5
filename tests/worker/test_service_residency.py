"""A worker process with one slab and two sessions, with a real broker and state store."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.worker.tiny_worker import tiny_models
from tests.worker.worker_scene import TAKEOVERS, Scene, environment, pool, scene, store
from turboserve.contracts.requests import EndSession, SessionRef, SubmitPrompt
from turboserve.contracts.workers import Playhead
from turboserve.ids import new_id
from turboserve.subjects import END_SESSION, PAUSE_SESSION, PLAYHEAD, RESUME_SESSION, SUBMIT_PROMPT
from turboserve.worker.engine.budget import plan
from turboserve.worker.settings import Settings

__all__ = ["environment", "pool", "scene", "store"]

# The first test waits until torch, Postgres and the state store have started.
pytestmark = pytest.mark.timeout(900)

BUDGET = plan(tiny_models(Settings()), 0)
SIZES = {
    "TURBOSERVE_MEMORY_BYTES": str(BUDGET.expected_bytes(1) + BUDGET.session_bytes // 2),
    "TURBOSERVE_HOST_SESSIONS": "1",
    "TURBOSERVE_OVERLAP": "on",
}
"""One slab. Workers of tests have at most two sessions."""
RETURNS = "turboserve_worker_residency_returns_total"


async def watched(scene: Scene, sessions: list[str], chunks: int) -> dict[str, int]:
    """Let viewers play until each session has that many chunks more. Returns their numbers of chunks."""
    over = asyncio.Event()
    playing = [asyncio.create_task(_watch(scene, session, over)) for session in sessions]
    first = {session: await _made(scene, session) for session in sessions}
    try:

        async def enough() -> bool:
            return all([await _made(scene, each) >= first[each] + chunks for each in sessions])

        await scene.until(enough, f"{chunks} more chunks of each session")
        return {session: await _made(scene, session) for session in sessions}
    finally:
        # Not by `cancel`: Python 3.11's `wait_for` drops a cancellation that comes together with its result.
        over.set()
        await asyncio.gather(*playing, return_exceptions=True)


async def _made(scene: Scene, session: str) -> int:
    try:
        return (await scene.newest(session)).header.index + 1
    except AssertionError:
        return 0


async def _watch(scene: Scene, session: str, over: asyncio.Event) -> None:
    playhead_s = 0.0
    while not over.is_set():
        if await _made(scene, session):
            playhead_s = min(playhead_s + 0.1, (await scene.newest(session)).header.start_s)
        await scene.bus.publish(
            PLAYHEAD, session, Playhead(session=session, playhead_s=playhead_s, age_s=0.0, viewers=1)
        )
        await asyncio.sleep(0.1)


async def test_a_worker_serves_more_sessions_than_slabs_and_leaves_no_memory(scene: Scene) -> None:
    worker = await scene.worker(**SIZES)
    sessions = [await scene.started(worker, seed=seed) for seed in range(2)]
    await scene.until(lambda: scene.loads[worker].capacity == 2, "the report counts both memories")
    assert scene.loads[worker].host_sessions == 1
    latency_s = scene.loads[worker].chunk_latency_s
    assert latency_s == pytest.approx({1: latency_s[1], 2: 2 * latency_s[1]})
    await watched(scene, sessions, 9)
    assert scene.metric(worker, RETURNS) > 2
    assert scene.metric(worker, "turboserve_worker_sessions_resident") <= 1
    await scene.ask(
        SUBMIT_PROMPT, SubmitPrompt(session=sessions[0], prompt="a blue square", prompt_id=new_id("prm"))
    )
    await scene.ask(PAUSE_SESSION, SessionRef(session=sessions[1]))

    async def switched() -> bool:
        return (await scene.newest(sessions[0])).header.control_seq > 0

    over = asyncio.Event()
    playing = asyncio.create_task(_watch(scene, sessions[0], over))
    await scene.until(switched, "a chunk shows the prompt")
    await scene.until(
        lambda: not all(held.resident for held in scene.loads[worker].sessions), "one session is suspended"
    )
    over.set()
    await playing
    await scene.ask(RESUME_SESSION, SessionRef(session=sessions[1]))
    await scene.place(sessions[1], worker)
    await watched(scene, sessions, 3)
    for session in sessions:
        await scene.ask(END_SESSION, EndSession(session=session))

    def empty() -> bool:
        names = ("turboserve_worker_kv_bytes", "turboserve_worker_host_memory_bytes")
        used = sum(scene.metric(worker, name) for name in names)
        return used + scene.metric(worker, "turboserve_worker_offloaded_memory_bytes") == 0

    await scene.until(empty, "all memory is free")


async def test_sessions_of_a_worker_that_is_killed_within_a_copy_continue_elsewhere(scene: Scene) -> None:
    """Copies are slowed down, so that the worker dies in the middle of one."""
    worker = await scene.worker(**SIZES, TINY_WORKER_COPY_S="0.1")
    other = await scene.worker()
    sessions = [await scene.started(worker, seed=seed) for seed in range(2)]
    before = await watched(scene, sessions, 4)
    over = asyncio.Event()
    playing = [asyncio.create_task(_watch(scene, session, over)) for session in sessions]
    copies = scene.pool.log(worker)
    count = copies.read_text(errors="replace").count("copy begins")
    await scene.until(
        lambda: copies.read_text(errors="replace").count("copy begins") > count, "a copy is in progress"
    )
    scene.signal(worker, signal.SIGKILL)
    over.set()
    await asyncio.gather(*playing, return_exceptions=True)
    await scene.declare_gone(worker)
    for session in sessions:
        await scene.place(session, other, kind="recover")
    after = await watched(scene, sessions, 3)
    assert all(after[session] > before[session] for session in sessions)
    assert scene.metric(other, TAKEOVERS) >= 2
    for session in sessions:
        # The log is contiguous, and each index is there once.
        await scene.chunks(session, after[session])

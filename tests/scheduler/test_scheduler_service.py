"""The scheduler as a process, with the real broker and state store, and workers that only report sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.helpers.waiting import eventually
from turboserve import subjects
from turboserve.bus import Bus
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.requests import MigrateSession, MigrationAccepted, SessionRef
from turboserve.contracts.sessions import Activity, Phase
from turboserve.contracts.workers import Playhead
from turboserve.tasks import stop

Workers = Callable[..., Awaitable[Any]]


async def test_sessions_are_spread_over_the_workers(
    scheduler: Any, workers: Workers, viewers: Any, until_known: Callable[[int], Awaitable[None]]
) -> None:
    first, second = await workers(4), await workers(4)
    await until_known(2)
    sessions = [await viewers.create() for _ in range(6)]
    owners = [(await viewers.active(session)).worker for session in sessions]
    assert sorted(owners.count(worker.id) for worker in (first, second)) == [3, 3]


async def test_a_burst_fills_and_never_overfills(scheduler: Any, workers: Workers, viewers: Any) -> None:
    pool = [await workers(2), await workers(3)]
    sessions = await asyncio.gather(*(viewers.create() for _ in range(5)))
    records = [await viewers.active(session) for session in sessions]
    for worker in pool:
        assert [record.worker for record in records].count(worker.id) == worker.capacity


async def test_killed_it_comes_back_with_the_same_view(
    scheduler: Any, workers: Workers, viewers: Any
) -> None:
    worker = await workers(2)
    first = await viewers.create()
    await viewers.active(first)
    scheduler.end()
    second = await viewers.create()
    assert (await viewers.get(second)).phase is Phase.REQUESTED
    scheduler.start()
    assert (await viewers.active(second)).worker == worker.id
    assert (await viewers.get(first)).epoch == 1


async def test_killed_in_the_middle_of_a_migration_it_finishes_the_migration(
    scheduler: Any, workers: Workers, viewers: Any
) -> None:
    first = await workers(4)
    session = await viewers.create()
    await viewers.active(session)
    second = await workers(4)
    first.provides_state = second.provides_state = True
    begun = await migrate(viewers, session, second.id)
    assert (begun.record.phase, begun.record.target) == (Phase.MIGRATING, second.id)
    scheduler.end()
    second.verifies = True
    assert (await viewers.get(session)).migration == begun.record.migration
    scheduler.start()
    record = await viewers.active(session, epoch=2)
    assert (record.worker, record.target) == (second.id, None)
    decisions = await viewers.bus.call(subjects.LIST_DECISIONS, SessionRef(session=session))
    assert [one.kind for one in decisions.decisions] == ["place", "migrate", "migrated"]


async def migrate(viewers: Any, session: str, worker: str) -> MigrationAccepted:
    """Request a migration until the scheduler knows both ends and does nothing else with the session."""
    request = MigrateSession(session=session, worker=worker)
    async with asyncio.timeout(180):
        while True:
            try:
                # A request whose answer is lost has taken effect all the same.
                accepted: MigrationAccepted = await viewers.bus.call(
                    subjects.MIGRATE_SESSION, request, deadline_s=60.0
                )
            except TurboServeError as refused:
                print(f"the migration is refused: {refused}")
                await asyncio.sleep(0.2)
            else:
                return accepted


async def test_a_report_of_urgent_sessions_on_a_loaded_worker_migrates_one_to_a_relaxed_worker(
    scheduler: Any, workers: Workers, viewers: Any, until_known: Callable[[int], Awaitable[None]]
) -> None:
    scheduler.end()
    scheduler.start(TURBOSERVE_RESCUE_HORIZON_S="6")
    try:
        pool = [await workers(4), await workers(4)]
        for worker in pool:
            worker.provides_state = worker.verifies = True
            worker.chunk_latency_s = {n: 0.24 * n for n in range(1, 5)}
        await until_known(2)
        sessions = [await viewers.create() for _ in range(4)]
        owners = {session: (await viewers.active(session)).worker for session in sessions}
        urgent, relaxed = pool
        mine = [session for session, owner in owners.items() if owner == urgent.id]
        # Both hold two, so nothing migrates for balance.
        assert len(mine) == 2
        relaxed.slacks_s = {session: 3.0 for session in sessions if session not in mine}
        reports = {worker.id: worker.reported + 5 for worker in pool}
        # One report may be under way without the new slacks. The scheduler decides on each of the others.
        await eventually(lambda: all(worker.reported >= reports[worker.id] for worker in pool))
        for session in sessions:
            assert (await viewers.get(session)).epoch == 1
        # Each chunk takes 0.24 s alone: the second of two would be late. A worker keeps up with three.
        urgent.slacks_s = dict(zip(mine, (0.23, 0.3), strict=True))
        async with asyncio.timeout(120):
            while not (gone := [s for s in mine if (await viewers.get(s)).worker == relaxed.id]):
                await asyncio.sleep(0.1)
        decisions = (await viewers.bus.call(subjects.LIST_DECISIONS, SessionRef(session=gone[0]))).decisions
        migrate_ = next(one for one in decisions if one.kind == "migrate")
        assert migrate_.reason.startswith("rescue: ")
        assert migrate_.numbers["late_chunks"] > migrate_.numbers["late_chunks_after"]
        assert migrate_.numbers["horizon_s"] == 6.0
    finally:
        scheduler.end()


async def test_a_refusal_migrates_the_session(scheduler: Any, workers: Workers, viewers: Any) -> None:
    unwilling = await workers(4)
    unwilling.refuse = True
    session = await viewers.create()
    await viewers.active(session)
    willing = await workers(4)
    record = await viewers.active(session, epoch=2)
    assert record.worker == willing.id


async def test_resumes_where_the_state_is(scheduler: Any, workers: Workers, viewers: Any) -> None:
    await workers(4)
    await workers(4)
    session = await viewers.create()
    before = await viewers.active(session)
    await viewers.bus.call(subjects.PAUSE_SESSION, SessionRef(session=session))
    # The others make the holder the busier worker.
    for _ in range(4):
        await viewers.active(await viewers.create())
    await viewers.bus.call(subjects.RESUME_SESSION, SessionRef(session=session))
    after = await viewers.active(session, epoch=2)
    assert after.worker == before.worker


async def test_the_autoscaler_gets_the_load(
    scheduler: Any, workers: Workers, viewers: Any, connect: Callable[[str], Awaitable[Bus]]
) -> None:
    heard: list[Any] = []

    async def hear(feedback: Any, _body: bytes) -> None:
        heard.append(feedback)

    bus = await connect("autoscaler")
    await bus.subscribe(subjects.FEEDBACK, "*", hear)
    await workers(4)
    session = await viewers.create()
    await viewers.active(session)
    deadline = asyncio.get_running_loop().time() + 60
    while not any(f.model == "quiet" and f.rho_max == 0.25 and f.required == 1 for f in heard):
        assert asyncio.get_running_loop().time() < deadline, heard[-5:]
        await asyncio.sleep(0.05)


async def test_no_viewer_watches(scheduler: Any, workers: Workers, viewers: Any) -> None:
    scheduler.end()
    scheduler.start(TURBOSERVE_IDLE_AFTER_S="8")
    await workers(4)
    watched = await viewers.create()

    async def watch() -> None:
        while True:
            playhead = Playhead(session=watched, playhead_s=1.0, viewers=1)
            await viewers.bus.publish(subjects.PLAYHEAD, watched, playhead)
            await asyncio.sleep(0.25)

    # From the beginning: on a busy machine it would be idle before the other worker has joined.
    watching = asyncio.create_task(watch())
    try:
        await viewers.active(watched)
        forgotten = await viewers.create()
        await viewers.active(forgotten)
        record = await viewers.in_phase(forgotten, Phase.SUSPENDED)
        assert record.activity is Activity.IDLE
        assert (await viewers.get(watched)).phase is Phase.ACTIVE
    finally:
        await stop(watching)
        scheduler.end()

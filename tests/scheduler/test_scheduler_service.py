"""The scheduler as a process, with the real broker and state store; workers that only say what they run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from turboserve import subjects
from turboserve.bus import Bus
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.requests import EndSession, MoveAccepted, MoveSession, SessionRef
from turboserve.contracts.sessions import Activity, Phase
from turboserve.contracts.workers import Playhead
from turboserve.tasks import stop

Workers = Callable[..., Awaitable[Any]]


async def test_sessions_are_spread_over_the_workers(scheduler: Any, workers: Workers, viewers: Any) -> None:
    first, second = await workers(4), await workers(4)
    sessions = [await viewers.create() for _ in range(6)]
    owners = [(await viewers.active(session)).worker for session in sessions]
    assert sorted(owners.count(worker.id) for worker in (first, second)) == [3, 3]


async def test_a_burst_fills_and_never_overfills(scheduler: Any, workers: Workers, viewers: Any) -> None:
    pool = [await workers(2), await workers(3)]
    sessions = await asyncio.gather(*(viewers.create() for _ in range(5)))
    records = [await viewers.active(session) for session in sessions]
    for worker in pool:
        assert [record.worker for record in records].count(worker.id) == worker.capacity


async def test_a_dead_worker_is_noticed_and_its_sessions_go_on_elsewhere(
    scheduler: Any, workers: Workers, viewers: Any
) -> None:
    first, second = await workers(4), await workers(4)
    sessions = [await viewers.create() for _ in range(4)]
    for session in sessions:
        await viewers.active(session)
    lost = [s for s in sessions if (await viewers.get(s)).worker == first.id]
    await first.die()
    for session in lost:
        record = await viewers.active(session, epoch=2)
        assert record.worker == second.id
    decisions = await viewers.bus.call(subjects.LIST_DECISIONS, SessionRef(session=lost[0]))
    recovery = next(d for d in decisions.decisions if d.epoch == 2)
    assert recovery.kind == "recover"
    assert recovery.reason == f"its worker {first.id} is gone: the bottleneck latency grows least"
    assert recovery.numbers["capacity"] == 4


async def test_a_worker_whose_reports_are_lost_is_not_dead(
    scheduler: Any, workers: Workers, viewers: Any
) -> None:
    """It renews with the store, so its sessions stay, however long nobody hears its load reports."""
    worker = await workers(4)
    session = await viewers.create()
    await viewers.active(session)
    worker.reports = False
    await asyncio.sleep(6.0)
    record = await viewers.get(session)
    assert (record.worker, record.epoch) == (worker.id, 1)
    assert not worker.gone


async def test_a_scheduler_that_was_held_up_declares_nobody_dead(
    scheduler: Any, workers: Workers, viewers: Any
) -> None:
    """Incident: after a pause longer than the time-out, the first tick found every worker silent."""
    worker = await workers(4)
    session = await viewers.create()
    await viewers.active(session)
    os.kill(scheduler.pid, signal.SIGSTOP)
    await asyncio.sleep(5.0)
    os.kill(scheduler.pid, signal.SIGCONT)
    another = await viewers.create()
    await viewers.active(another)
    assert not worker.gone
    assert (await viewers.get(session)).epoch == 1


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


async def test_what_died_while_it_was_away_is_recovered(
    scheduler: Any, workers: Workers, viewers: Any
) -> None:
    first = await workers(2)
    session = await viewers.create()
    await viewers.active(session)
    scheduler.end()
    await first.die()
    second = await workers(2)
    scheduler.start()
    assert (await viewers.active(session, epoch=2)).worker == second.id


async def test_killed_in_the_middle_of_a_move_it_finishes_the_move(
    scheduler: Any, workers: Workers, viewers: Any
) -> None:
    first = await workers(4)
    session = await viewers.create()
    await viewers.active(session)
    second = await workers(4)
    first.gives_state = second.gives_state = True
    begun = await move(viewers, session, second.id)
    assert (begun.record.phase, begun.record.target) == (Phase.MIGRATING, second.id)
    scheduler.end()
    second.verifies = True
    assert (await viewers.get(session)).move == begun.record.move
    scheduler.start()
    record = await viewers.active(session, epoch=2)
    assert (record.worker, record.target) == (second.id, None)
    decisions = await viewers.bus.call(subjects.LIST_DECISIONS, SessionRef(session=session))
    assert [one.kind for one in decisions.decisions] == ["place", "migrate", "moved"]


async def move(viewers: Any, session: str, worker: str) -> MoveAccepted:
    """Ask until the scheduler knows both and nothing else is being done."""
    request = MoveSession(session=session, worker=worker)
    async with asyncio.timeout(60):
        while True:
            with suppress(TurboServeError):
                accepted: MoveAccepted = await viewers.bus.call(
                    subjects.MOVE_SESSION, request, deadline_s=5.0
                )
                return accepted
            await asyncio.sleep(0.2)


async def test_a_refusal_moves_the_session(scheduler: Any, workers: Workers, viewers: Any) -> None:
    unwilling = await workers(4)
    unwilling.refuse = True
    session = await viewers.create()
    await viewers.active(session)
    willing = await workers(4)
    record = await viewers.active(session, epoch=2)
    assert record.worker == willing.id


async def test_a_freed_slot_goes_to_who_waits(scheduler: Any, workers: Workers, viewers: Any) -> None:
    worker, other = await workers(1), await workers(1)
    first, second = await viewers.create(), await viewers.create()
    await viewers.active(first)
    await viewers.active(second)
    lost = first if (await viewers.get(first)).worker == other.id else second
    kept = second if lost == first else first
    await other.die()

    async def waits() -> bool:
        page = await viewers.bus.call(subjects.LIST_DECISIONS, SessionRef(session=lost))
        gone = f"its worker {other.id} is gone"
        return any(d.kind == "wait" and d.reason.startswith(gone) for d in page.decisions)

    deadline = asyncio.get_running_loop().time() + 60
    while not await waits():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)
    assert (await viewers.get(lost)).epoch == 1
    await viewers.bus.call(subjects.END_SESSION, EndSession(session=kept))
    assert (await viewers.active(lost, epoch=2)).worker == worker.id


async def test_resumes_where_the_state_is(scheduler: Any, workers: Workers, viewers: Any) -> None:
    await workers(4)
    await workers(4)
    session = await viewers.create()
    before = await viewers.active(session)
    await viewers.bus.call(subjects.PAUSE_SESSION, SessionRef(session=session))
    # The others make the holder the busier one.
    for _ in range(4):
        await viewers.active(await viewers.create())
    await viewers.bus.call(subjects.RESUME_SESSION, SessionRef(session=session))
    after = await viewers.active(session, epoch=2)
    assert after.worker == before.worker


async def test_the_autoscaler_is_told_the_load(
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
    deadline = asyncio.get_running_loop().time() + 10
    while not any(f.model == "quiet" and f.rho_max == 0.25 and f.required == 1 for f in heard):
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)


async def test_nobody_watches(scheduler: Any, workers: Workers, viewers: Any) -> None:
    scheduler.end()
    scheduler.start(TURBOSERVE_IDLE_AFTER_S="2")
    await workers(4)
    watched, forgotten = await viewers.create(), await viewers.create()
    await viewers.active(watched)
    await viewers.active(forgotten)

    async def watch() -> None:
        while True:
            playhead = Playhead(session=watched, playhead_s=1.0, viewers=1)
            await viewers.bus.publish(subjects.PLAYHEAD, watched, playhead)
            await asyncio.sleep(0.25)

    watching = asyncio.create_task(watch())
    try:
        record = await viewers.in_phase(forgotten, Phase.SUSPENDED)
        assert record.activity is Activity.IDLE
        assert (await viewers.get(watched)).phase is Phase.ACTIVE
    finally:
        await stop(watching)
        scheduler.end()

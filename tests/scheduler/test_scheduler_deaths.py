"""Workers that die, and workers that only seem to, with the scheduler and the state store as processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.helpers.waiting import eventually
from tests.scheduler.scheduler_instances import Instance
from turboserve import subjects
from turboserve.contracts.requests import EndSession, SessionRef

Workers = Callable[..., Awaitable[Any]]
UntilKnown = Callable[[int], Awaitable[None]]
WORKER_TIMEOUT_S = 12.0
"""Short, because tests wait for it. The workers are the test's own tasks, so its stalls must be shorter."""


@pytest.fixture(scope="module")
def worker_timeout_s() -> float:
    return WORKER_TIMEOUT_S


async def test_a_dead_worker_is_noticed_and_its_sessions_go_on_elsewhere(
    scheduler: Any, workers: Workers, viewers: Any, until_known: UntilKnown
) -> None:
    first, second = await workers(4), await workers(4)
    await until_known(2)
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
    scheduler: Any, workers: Workers, viewers: Any, until_known: UntilKnown
) -> None:
    """It renews with the store, so its sessions stay even if all its load reports are lost."""
    worker = await workers(4)
    session = await viewers.create()
    await viewers.active(session)
    worker.reports = False
    # Another worker is silent since a later time. Once it is declared gone, the first could have been, too.
    dead = await workers(4)
    await until_known(2)
    await dead.die()
    await until_known(1)
    record = await viewers.get(session)
    assert (record.worker, record.epoch) == (worker.id, 1)
    assert not worker.gone


async def test_a_scheduler_that_was_paused_declares_no_worker_dead(
    scheduler: Any, workers: Workers, viewers: Any
) -> None:
    """Incident: after a pause longer than the timeout, the first tick found every worker silent."""
    worker = await workers(4)
    session = await viewers.create()
    await viewers.active(session)
    os.kill(scheduler.pid, signal.SIGSTOP)
    # The length of the pause is what is tested. The assertions wait for what the scheduler does after it.
    await asyncio.sleep(1.5 * WORKER_TIMEOUT_S)
    os.kill(scheduler.pid, signal.SIGCONT)
    another = await viewers.create()
    await viewers.active(another)
    assert not worker.gone
    assert (await viewers.get(session)).epoch == 1


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

    await eventually(waits)
    assert (await viewers.get(lost)).epoch == 1
    await viewers.bus.call(subjects.END_SESSION, EndSession(session=kept))
    assert (await viewers.active(lost, epoch=2)).worker == worker.id


async def test_worker_deaths_are_found_by_the_new_leader(
    pair: tuple[Instance, Instance], workers: Workers, viewers: Any, until_known: UntilKnown
) -> None:
    leader, _ = pair
    first, second = await workers(4), await workers(4)
    await until_known(2)
    sessions = [await viewers.create() for _ in range(4)]
    owners = {session: (await viewers.active(session)).worker for session in sessions}
    assert set(owners.values()) == {first.id, second.id}
    leader.service.end()
    await first.die()
    for session, owner in owners.items():
        if owner == first.id:
            assert (await viewers.active(session, epoch=2)).worker == second.id
        else:
            assert (await viewers.get(session)).epoch == 1

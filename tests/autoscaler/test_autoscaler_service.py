"""The autoscaler as a process, with the real broker and state store, and workers that are real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.service_process import connected
from tests.helpers.waiting import eventually
from turboserve import subjects
from turboserve.cli.embedded import NatsServer
from turboserve.contracts.cost import GetCost
from turboserve.contracts.pool import LoadFeedback, OrderPool, PoolMemberPhase
from turboserve.contracts.workers import WorkerRecord
from turboserve.tasks import stop

PATIENT_S = 60.0
"""For an answer of the store on a busy machine."""


def lives(pid: int | None) -> bool:
    """Whether the process is there and not just waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def gone(pid: int | None) -> None:
    """Wait until the process has ended."""

    async def has_ended() -> bool:
        return not lives(pid)

    await eventually(has_ended)


async def test_a_killed_worker_is_replaced_and_the_store_knows_why(autoscaler: Any) -> None:
    autoscaler.variables["TURBOSERVE_POOL_SIZE"] = "2"
    autoscaler.start()
    before = await autoscaler.ready(2)
    assert len({row.id for row in before.values()}) == 2
    victim = sorted(before)[0]
    os.kill(before[victim].pid, signal.SIGKILL)
    await autoscaler.replaced(victim, before[victim].id)
    after = await autoscaler.ready(2)
    assert after[victim].id != before[victim].id
    assert {row.id for row in after.values()} - {after[victim].id} == {row.id for row in before.values()} - {
        before[victim].id
    }
    assert await autoscaler.reason(before[victim].id) == "the process was ended by SIGKILL"
    # What it said last may be older than the death.
    await autoscaler.says(
        lambda s: (s.ready, s.target, s.reason) == (2, 2, None) and "gone" in [a.action for a in s.actions]
    )


async def test_after_kill_9_of_the_autoscaler_its_workers_are_adopted(autoscaler: Any) -> None:
    autoscaler.variables["TURBOSERVE_POOL_SIZE"] = "2"
    autoscaler.start()
    before = await autoscaler.ready(2)
    autoscaler.end(signal.SIGKILL)
    # One of them dies while nobody looks.
    lost, kept = sorted(before)
    os.kill(before[lost].pid, signal.SIGKILL)
    assert lives(before[kept].pid)
    autoscaler.start()
    await autoscaler.replaced(lost, before[lost].id)
    after = await autoscaler.ready(2)
    assert after[kept].id == before[kept].id
    assert await autoscaler.reason(before[lost].id) == "no such process in the pool"
    # An adopted worker is watched like any other.
    os.kill(before[kept].pid, signal.SIGKILL)
    await autoscaler.replaced(kept, before[kept].id)
    last = await autoscaler.ready(2)
    assert last[kept].id != before[kept].id
    assert await autoscaler.reason(before[kept].id) == "the process has ended"


async def test_an_orderly_stop_leaves_the_workers_for_the_next(autoscaler: Any) -> None:
    autoscaler.start()
    [before] = (await autoscaler.ready(1)).values()
    autoscaler.end(signal.SIGTERM)
    assert lives(before.pid)
    autoscaler.start()
    await autoscaler.says(lambda s: any(a.action == "adopt" for a in s.actions) and s.ready == 1)
    assert [row.id for row in (await autoscaler.rows()).values()] == [before.id]


async def test_on_request_it_stops_the_workers_with_itself(autoscaler: Any) -> None:
    autoscaler.variables["TURBOSERVE_POOL_STOP_WITH_AUTOSCALER"] = "1"
    # The store has half a second to acknowledge the final report, and may be too busy for one of them.
    for _ in range(5):
        autoscaler.start()
        [worker] = (await autoscaler.ready(1)).values()
        autoscaler.end(signal.SIGTERM)
        await gone(worker.pid)
        if await autoscaler.rows() == {}:
            break
        assert "final report not acknowledged" in autoscaler.logged()
    else:
        pytest.fail("no final report was acknowledged")


async def test_a_worker_that_never_becomes_ready_is_replaced(autoscaler: Any) -> None:
    autoscaler.mode = "never"
    autoscaler.variables["TURBOSERVE_POOL_READY_TIMEOUT_S"] = "20"
    autoscaler.start()
    status = await autoscaler.says(lambda s: s.members[0].phase is PoolMemberPhase.LOADING)
    pid = status.members[0].pid
    autoscaler.mode = "ready"
    [worker] = (await autoscaler.ready(1)).values()
    assert worker.pid != pid
    await gone(pid)
    status = await autoscaler.says(lambda s: s.ready == 1)
    assert "not ready within 20 s" in [action.reason for action in status.actions]


async def test_a_worker_that_crashes_at_start_is_tried_again_later_and_later(autoscaler: Any) -> None:
    autoscaler.mode = "crash"
    autoscaler.start()
    # Between two attempts: while one starts, the reason is that.
    await autoscaler.says(lambda s: s.members[0].failures >= 3 and "status 3" in (s.reason or ""))
    autoscaler.mode = "ready"
    await autoscaler.ready(1)


async def test_a_smaller_pool_drains_what_is_too_much(autoscaler: Any) -> None:
    autoscaler.variables["TURBOSERVE_POOL_SIZE"] = "2"
    autoscaler.start()
    before = await autoscaler.ready(2)
    autoscaler.end(signal.SIGTERM)
    autoscaler.variables["TURBOSERVE_POOL_SIZE"] = "1"
    autoscaler.start()
    [kept] = (await autoscaler.ready(1)).values()
    [left] = [row for row in before.values() if row.id != kept.id]
    await gone(left.pid)
    assert await autoscaler.reason(left.id) == "drained"
    status = await autoscaler.says(lambda s: s.target == 1 and left.id not in [t.worker for t in s.members])
    assert [a.action for a in status.actions if a.worker == left.id] == ["adopt", "ready", "drain", "release"]


async def test_orders_size_and_cost_outlive_kill_9_of_the_autoscaler(autoscaler: Any) -> None:
    name = autoscaler.variables["TURBOSERVE_POOL_NAME"]
    autoscaler.variables |= {"TURBOSERVE_POOL_MIN": "1", "TURBOSERVE_POOL_MAX": "3"}
    began = time.time()
    autoscaler.start()
    await autoscaler.ready(1)
    await autoscaler.says(lambda s: s.orders == 0)
    order = OrderPool(pool=name, change=("override",), override=2)
    await autoscaler.bus.call(subjects.ORDER_POOL, order, deadline_s=PATIENT_S)
    before = await autoscaler.ready(2)
    await autoscaler.says(lambda s: s.scaling.mode == "override" and s.start_up_s is not None)

    autoscaler.end(signal.SIGKILL)
    autoscaler.status = None
    autoscaler.start()
    status = await autoscaler.says(lambda s: s.orders == 1 and s.ready == 2)
    assert (status.scaling.mode, status.scaling.target) == ("override", 2)
    assert {row.id for row in (await autoscaler.ready(2)).values()} == {row.id for row in before.values()}

    # Given back to the controller, which hears of no load at all: the pool stays as it is, and says why.
    back = OrderPool(pool=name, change=("override",))
    await autoscaler.bus.call(subjects.ORDER_POOL, back, deadline_s=PATIENT_S)
    status = await autoscaler.says(lambda s: s.orders == 2 and s.scaling.mode == "auto")
    assert status.scaling.stale
    assert status.target == 2
    assert not [action for action in status.actions if action.action == "drain"]

    # Two workers that were there all the time, each paid for once.
    cost = await autoscaler.bus.call(subjects.GET_COST, GetCost(), deadline_s=PATIENT_S)
    [pool] = [one for one in cost.pools if one.pool == name]
    assert 0 < pool.gpu_seconds <= 2 * (time.time() - began)


OFFERS = """
[kinds.any]
price = 1
most = 2
start_s = 20
switch_s = 10
[[offers]]
name = "one"
kind = "any"
model = "quiet"
sessions = 2
[[offers]]
name = "two"
kind = "any"
model = "loud"
sessions = 2
"""


async def test_a_switch_starts_the_other_model_in_the_place_of_the_worker_that_ends(
    autoscaler: Any, nats_server: NatsServer, tmp_path: Path
) -> None:
    (tmp_path / "pool.toml").write_text(OFFERS)
    autoscaler.variables |= {
        "TURBOSERVE_POOL_FILE": str(tmp_path / "pool.toml"),
        # The kind has room for two. So only a switch keeps to the one that is ordered.
        "TURBOSERVE_POOL_OVERRIDE": "1",
        "TURBOSERVE_SCALE_STALE_S": "60",
    }
    scheduler = await connected(nats_server, "scheduler")
    wanted, most = {"quiet": 1, "loud": 0}, [0]

    async def report() -> None:
        while True:
            for model, sessions in wanted.items():
                load = LoadFeedback(
                    model=model,
                    rho_max=0.0,
                    required=sessions,
                    waiting=sessions,
                    capacity=0,
                    workers=0,
                    at=time.time(),
                )
                await scheduler.publish(subjects.FEEDBACK, model, load)
            most[0] = max(most[0], len(autoscaler.workers()))
            await asyncio.sleep(0.3)

    async def until(member: str) -> WorkerRecord:
        await autoscaler.says(lambda s: [m.member for m in s.members if m.phase == "ready"] == [member])
        found: dict[str, WorkerRecord] = await autoscaler.ready(1)
        return found[member]

    reports = asyncio.create_task(report())
    try:
        autoscaler.start()
        pool = autoscaler.name
        first = await until(f"{pool}-one-0")
        wanted |= {"quiet": 0, "loud": 1}
        second = await until(f"{pool}-two-0")
        assert (first.model, second.model) == ("quiet", "loud")
        assert first.id != second.id
        assert await autoscaler.reason(first.id) == "drained"
        assert most == [1]
        decisions = autoscaler.status.scaling.decisions
        [switch] = [one for one in decisions if one.action == "switch"]
        assert switch.reason.startswith("switch one to two: ")
        # The autoscaler dies in the midst of the next one. Its successor finds what lives, and goes on.
        wanted |= {"quiet": 1, "loud": 0}
        await autoscaler.says(lambda s: not any(m.phase == "ready" and m.wanted for m in s.members))
        autoscaler.end(signal.SIGKILL)
        autoscaler.status = None
        autoscaler.start()
        third = await until(f"{pool}-one-0")
        assert third.model == "quiet"
        assert await autoscaler.reason(second.id)
        assert len(autoscaler.workers()) == 1
    finally:
        await stop(reports)
        await scheduler.close()

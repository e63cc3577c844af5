"""The history of pools survives `kill -9` of the state store, and stays within its size."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.helpers.waiting import eventually
from tests.state_store.conftest import StartStore
from tests.state_store.state_store_harness import Harness, Process, Store
from turboserve import history_subjects, subjects
from turboserve.contracts.cost import Rental
from turboserve.contracts.pool import PoolReport
from turboserve.contracts.pool_history import (
    GetPoolHistory,
    ListLanes,
    ListPoolDecisions,
    PoolDecision,
    PoolSample,
)
from turboserve.ids import new_id
from turboserve.state_store import periodic_writes
from turboserve.state_store.settings import Settings

BEGAN = time.time() - 600.0


async def report(api: Harness, pool: str, number: int, *rentals: Rental) -> None:
    decision = PoolDecision(number=number, at=BEGAN + number, kind="action", action="launch", reason="r")
    sample = PoolSample(ready=number, required=1_000 - number)
    await api.bus.call(
        subjects.REPORT_POOL,
        PoolReport(
            pool=pool, model="m", process="asc_1", sample=sample, decisions=(decision,), rentals=rentals
        ),
    )


def hour() -> dict[str, Any]:
    return {"since": time.time() - 3_600.0, "until": time.time() + 60.0}


async def lanes(api: Harness, pool: str) -> list[tuple[str, int]]:
    page = await api.bus.call(history_subjects.LIST_LANES, ListLanes(pool=pool, **hour()))
    return [(lane.session, bar.first) for one in page.workers for lane in one.sessions for bar in lane.bars]


async def test_what_was_answered_survives_kill_9(settings: Settings) -> None:
    pool, worker = new_id("p"), new_id("wk")
    rental = Rental(worker=worker, kind="test", age_s=10.0)
    async with Process.running(settings) as first, Harness.connected(settings) as api:
        await report(api, pool, 1, rental)
        await api.renew(worker, "m")
        record = await api.place(await api.create("m"), worker)
        for index in range(3):
            await api.chunk(record, index)
        await eventually(lambda: lanes(api, pool))
        await report(api, pool, 2, rental)
        first.process.kill()
    async with Process.running(settings), Harness.connected(settings) as api:
        # The autoscaler has no answer to its second report, and repeats it.
        await report(api, pool, 2, rental)
        page = await api.bus.call(
            history_subjects.LIST_POOL_DECISIONS, ListPoolDecisions(pool=pool, **hour())
        )
        assert [one.number for one in page.decisions] == [2, 1]
        found = await api.bus.call(
            history_subjects.GET_POOL_HISTORY, GetPoolHistory(pool=pool, step_s=600, **hour())
        )
        assert max(point.required or 0 for point in found.points) == 999
        assert found.points[-1].ready == 2
        assert {session for session, _ in await lanes(api, pool)} == {record.id}


async def test_an_orderly_stop_writes_what_was_counted(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(periodic_writes, "CHUNKS_S", 3_600.0)
    pool, worker = new_id("p"), new_id("wk")
    async with Harness.connected(settings) as api:
        async with Store.running(settings):
            await report(api, pool, 1, Rental(worker=worker, kind="test", age_s=10.0))
            await api.renew(worker, "m")
            record = await api.place(await api.create("m"), worker)
            for index in range(3):
                await api.chunk(record, index)

            async def counted() -> bool:
                return (await api.get(record.id)).next_chunk == 3

            await eventually(counted)
            assert not await lanes(api, pool)
        async with Store.running(settings):
            assert {session for session, _ in await lanes(api, pool)} == {record.id}


async def test_no_table_outgrows_its_number_of_rows(start_store: StartStore, settings: Settings) -> None:
    await start_store(purge_s=0.1, pool_history_rows=100)
    pool = new_id("p")
    async with Harness.connected(settings) as api:
        for number in range(1, 131):
            await report(api, pool, number)

        async def kept() -> list[int]:
            page = await api.bus.call(
                history_subjects.LIST_POOL_DECISIONS, ListPoolDecisions(pool=pool, limit=500, **hour())
            )
            return [one.number for one in page.decisions]

        async def trimmed() -> bool:
            return len(await kept()) <= 100

        await eventually(trimmed)
        assert await kept() == list(range(130, 30, -1))

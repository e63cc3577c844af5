"""Pools and cost: shares, orders, room that a pool may still make; nothing counted twice."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import select, update

from tests.helpers.waiting import CompletedCalls, eventually
from tests.state_store.state_store_harness import Harness, Process, Store
from turboserve import subjects
from turboserve.contracts.autoscale import LevelParameters, ProfileTable, Provenance
from turboserve.contracts.cost import CostReport, GetCost, Rental
from turboserve.contracts.errors import (
    NoCapacityError,
    NotFoundError,
    SessionNotFoundError,
    UnavailableError,
    UnknownModelError,
)
from turboserve.contracts.pool import OrderPool, PoolOrders, PoolReport
from turboserve.ids import new_id
from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.service.pools import Pools
from turboserve.state_store.settings import Settings
from turboserve.state_store.tables import pools

SERVERS = ("real", "memory")


@pytest.fixture(scope="module")
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"prices": {"test": 3_600.0}, "cost_sample_s": 0.1})


async def report(
    api: Harness, pool: str, *rentals: Rental, model: str = "paid", maximum: int = 0, process: str = "asc_1"
) -> PoolOrders:
    body = PoolReport(pool=pool, model=model, maximum=maximum, process=process, rentals=rentals)
    return await api.bus.call(subjects.REPORT_POOL, body)


async def cost(api: Harness, **fields: Any) -> CostReport:
    return await api.bus.call(subjects.GET_COST, GetCost(**fields))


def paid(worker: str, age_s: float, **more: Any) -> Rental:
    return Rental(worker=worker, kind="test", age_s=age_s, **more)


async def of_pool(api: Harness, pool: str) -> float:
    return next((p.gpu_seconds for p in (await cost(api)).pools if p.pool == pool), 0.0)


async def share(api: Harness, session: str) -> float:
    return (await cost(api, session=session)).sessions[0].gpu_seconds


async def test_two_sessions_share_their_workers_time_and_the_rest_is_idle(api: Harness) -> None:
    pool, worker = new_id("p"), new_id("wk")
    # A hundred GPUs, so that a moment is worth many seconds.
    launched = time.monotonic() - 10.0

    async def told(**more: Any) -> None:
        await report(api, pool, paid(worker, time.monotonic() - launched, gpus=100.0, **more))

    await report(api, pool, paid(worker, 10.0, gpus=100.0, ready_ago_s=4.0))
    await api.renew(worker, "paid")
    one, two = [await api.place(await api.create("paid"), worker) for _ in range(2)]

    async def reaches(session: str, gpu_seconds: float) -> bool:
        await told()
        return await share(api, session) >= gpu_seconds

    await eventually(lambda: reaches(two.id, 60.0))
    # They differ by the time that one had alone: between two samples, and during the second's placement.
    # Shares only grow, so the smaller one is read first.
    shared = await share(api, two.id)
    assert await share(api, one.id) >= shared > 0.0
    await api.pause(two.id)
    # What it used until then is counted with the next samples.
    counted = await share(api, one.id) + 60.0
    await eventually(lambda: reaches(one.id, counted))
    before = await share(api, two.id)
    await eventually(lambda: reaches(one.id, counted + 120.0))
    assert await share(api, two.id) <= before + 30.0

    await told(ended_ago_s=0.0)
    await api.gone(worker)
    total = await of_pool(api, pool)
    await report(api, pool)
    assert await of_pool(api, pool) == total
    found = await cost(api)
    parts = (found.used, found.idle, found.corrected)
    assert found.total.gpu_seconds == pytest.approx(sum(part.gpu_seconds for part in parts))
    # Before any session held a slot it was idle, and the time until it was ready is reported separately.
    assert found.idle.gpu_seconds >= 900.0
    [kind] = [kind for kind in found.kinds if kind.kind == "test"]
    assert kind.starting_gpu_seconds == pytest.approx(600.0, rel=0.1)
    assert kind.money == pytest.approx(kind.gpu_seconds)
    assert (kind.running, kind.workers) == (0, 1)


async def test_a_starting_worker_is_paid_for_by_no_session(api: Harness) -> None:
    """It never registers: only its pool knows it."""
    pool, worker = new_id("p"), new_id("wk")
    await report(api, pool, paid(worker, 30.0))
    assert await of_pool(api, pool) == pytest.approx(30.0, abs=1.0)
    await report(api, pool, paid(worker, 30.0))
    await report(api, pool)
    assert await of_pool(api, pool) == pytest.approx(30.0, abs=1.0)


async def test_only_the_tenants_own_sessions_are_listed(api: Harness) -> None:
    mine, theirs = await api.running("paid"), await api.create("paid", tenant="other")
    listed = [one.session for one in (await cost(api, tenant="acme")).sessions]
    assert mine.id in listed
    assert theirs.id not in listed
    with pytest.raises(SessionNotFoundError):
        await cost(api, tenant="acme", session=theirs.id)


async def test_orders_are_kept_and_every_change_has_a_number(api: Harness) -> None:
    pool = new_id("p")
    with pytest.raises(NotFoundError):
        await api.bus.call(subjects.ORDER_POOL, OrderPool(pool=pool, change=("override",), override=3))
    assert (await report(api, pool)).version == 0
    order = OrderPool(pool=pool, change=("override",), override=3)
    assert (await api.bus.call(subjects.ORDER_POOL, order)).version == 1
    order = OrderPool(pool=pool, change=("dry_run",), dry_run=True)
    assert (await api.bus.call(subjects.ORDER_POOL, order)).override == 3
    told = await report(api, pool)
    assert (told.version, told.override, told.dry_run) == (2, 3, True)
    await api.bus.call(subjects.ORDER_POOL, OrderPool(pool=pool, change=("override",)))
    told = await report(api, pool)
    assert (told.version, told.override, told.dry_run) == (3, None, True)


async def test_what_an_autoscaler_learned_is_kept_and_returned_to_its_next_process(api: Harness) -> None:
    pool = new_id("p")

    async def exchange(**fields: Any) -> str | None:
        body = PoolReport(pool=pool, model="paid", **fields)
        return (await api.bus.call(subjects.REPORT_POOL, body)).learned

    assert await exchange(recalls=True) is None
    assert await exchange(learned="first") is None
    assert await exchange(learned="second") is None
    assert await exchange() is None
    assert await exchange(recalls=True) == "second"
    order = OrderPool(pool=pool, change=("override",), override=3)
    assert (await api.bus.call(subjects.ORDER_POOL, order)).learned is None
    assert await exchange(recalls=True) == "second"
    assert await exchange(recalls=True, learned="third") == "third"


@pytest.mark.real_servers
async def test_a_stored_table_outside_of_todays_limits_costs_nothing_but_itself(
    api: Harness, settings: Settings
) -> None:
    """An earlier version had stored it.

    Incident: since then the pool's reports failed, and no order was read.
    """
    pool = new_id("p")
    await report(api, pool)
    row = LevelParameters(level=1, volatility_from=0, latency_weight=0.2, target_utilization=0.8)
    table = ProfileTable(levels=(row,), provenance=Provenance(source="a test"))
    await api.bus.call(subjects.ORDER_POOL, OrderPool(pool=pool, change=("table",), table=table))
    database = PostgresDatabase(settings)
    stored = table.model_dump(mode="json")
    stored["levels"][0]["target_utilization"] = 7.0
    async with database.transaction() as db:
        await db.connection.execute(update(pools).where(pools.c.id == pool).values(table=stored))
    told = await report(api, pool)
    assert (told.version, told.table) == (1, None)
    order = OrderPool(pool=pool, change=("override",), override=3)
    assert (await api.bus.call(subjects.ORDER_POOL, order)).override == 3
    # The stored table stays: a version that can read it may still need it.
    async with database.transaction() as db:
        assert (
            await db.connection.execute(select(pools.c.table).where(pools.c.id == pool))
        ).scalar_one() == stored
    await database.close()
    assert (await report(api, pool)).version == 2


async def test_a_pool_that_may_grow_lets_sessions_wait_and_one_that_may_not_refuses(api: Harness) -> None:
    model, pool = new_id("m"), new_id("p")
    with pytest.raises(UnknownModelError):
        await api.create(model)
    await report(api, pool, model=model)
    # The pool is there, and none of its workers yet.
    with pytest.raises(NoCapacityError):
        await api.create(model)
    await report(api, pool, model=model, maximum=2)
    # The capacity of its workers is not known yet: at least one session.
    await api.create(model)
    await api.create(model)
    with pytest.raises(NoCapacityError):
        await api.create(model)
    await api.worker(model, capacity=3)
    for _ in range(4):
        await api.create(model)
    with pytest.raises(NoCapacityError):
        await api.create(model)


async def test_a_share_is_never_given_at_the_price_of_an_unknown_kind(settings: Settings) -> None:
    """The pool does not report its worker's hardware; the worker does, and no sample has been taken yet."""
    rare = settings.model_copy(update={"prices": {"cpu": 3_600.0}, "cost_sample_s": 3_600.0})
    pool, model, worker = new_id("p"), new_id("m"), new_id("wk")
    launched = time.time() - 3.0

    async def told() -> None:
        rental = Rental(worker=worker, age_s=time.time() - launched, gpus=100.0)
        await report(api, pool, rental, model=model)

    async with Harness.connected(settings) as api, Store.running(rare):
        await told()
        await api.renew(worker, model)
        record = await api.place(await api.create(model), worker)

        async def has_share() -> bool:
            await told()
            return await share(api, record.id) > 0.0

        await eventually(has_share)
        [mine] = (await cost(api, session=record.id)).sessions
        assert mine.money == pytest.approx(mine.gpu_seconds)


@pytest.mark.real_servers
@pytest.mark.parametrize("point", ["shares given, not committed", "rentals written, not committed"])
async def test_kill_9_while_counting_neither_loses_nor_doubles(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Two GPUs more than MANY_GPUS of the store that dies, so that it recognizes the rental by them."""
    pool, model, worker = new_id("p"), new_id("m"), new_id("wk")
    samples = CompletedCalls(monkeypatch, Pools, "accrue")

    def rental(**more: Any) -> Rental:
        return paid(worker, time.time() - launched, gpus=502.0, **more)

    launched = time.time() - 3.0
    async with Harness.connected(settings) as api:
        async with Store.running(settings):
            await api.renew(worker, model)
            record = await api.place(await api.create(model), worker)
        # A dead store answers nothing.
        short = settings.model_copy(update={"request_deadline_s": 2.0})
        async with Process.running(settings, point) as process, Harness.connected(short) as unanswered:
            with suppress(UnavailableError):
                await report(unanswered, pool, rental(), model=model)
            assert await process.died() == -signal.SIGKILL
        async with Store.running(settings):

            async def counts() -> bool:
                await report(api, pool, rental(), model=model)
                return await share(api, record.id) > 502.0

            await eventually(counts)
            last = rental(ended_ago_s=0.0)
            await report(api, pool, last, model=model)
            assert await of_pool(api, pool) == pytest.approx(502.0 * last.age_s)
            await samples.more(2)
            given = await share(api, record.id)
            # The session gets the whole cost since it has its slot; a sample counted twice would give more.
            assert 502.0 < given <= 502.0 * last.age_s * (1 + 1e-9)
            await samples.more(2)
            assert await share(api, record.id) == given

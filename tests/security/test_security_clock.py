"""A wall clock that is wrong for a moment costs nothing and removes nothing.

Never the machine's own clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from pydantic import SecretStr

from tests.helpers.waiting import CompletedCalls, eventually
from tests.state_store.state_store_harness import Harness, Process, Store
from turboserve import subjects
from turboserve.bus import last_entry
from turboserve.clock import SystemClock
from turboserve.contracts.cost import CorrectCost, GetCost, Rental
from turboserve.contracts.errors import ConflictError, InvalidInputError, SessionNotFoundError
from turboserve.contracts.pool import PoolReport
from turboserve.contracts.requests import ListWorkers
from turboserve.contracts.sessions import Phase
from turboserve.contracts.workers import Playhead
from turboserve.ids import new_id
from turboserve.state_store.hot import redis as hot_redis
from turboserve.state_store.hot.probe import since_key
from turboserve.state_store.retention import Retention
from turboserve.state_store.settings import Settings

PATIENCE_S = 60.0
"""Time limit of operations that may take long on a busy machine."""
HOUR_S, DAYS_40_S = 3_600.0, 40 * 86_400.0
LIBFAKETIME = next(
    (str(path) for path in sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None
)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the deadline, so that a busy Redis does not count as unavailable."""
    monkeypatch.setattr(hot_redis, "DEADLINE_S", PATIENCE_S)


class SteppingClock(SystemClock):
    """The machine's clocks, with the wall clock off by `step_s`."""

    step_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.step_s


@pytest.fixture(scope="module")
def settings(nats_url: str, redis_url: str, postgres_url: str) -> Settings:
    with redis.Redis.from_url(redis_url) as client:
        client.set(since_key(str(client.info("server")["run_id"])), 1.0)
    return Settings(
        nats_url=nats_url,
        redis_url=SecretStr(redis_url),
        postgres_url=SecretStr(postgres_url),
        prices={"*": 3_600.0},
        transaction_deadline_s=PATIENCE_S,
        request_deadline_s=2 * PATIENCE_S,
        cost_sample_s=0.1,
        purge_s=0.1,
        sweep_s=0.2,
        chunk_retention_s=HOUR_S / 2,
        abandoned_after_s=HOUR_S / 2,
    )


class Pool:
    """Reports of an autoscaler with two workers, by its own monotonic clock."""

    def __init__(self, api: Harness) -> None:
        self.api, self.name, self.process = api, new_id("p"), new_id("asc")
        self.workers = [new_id("wk") for _ in range(2)]
        self.launched = time.monotonic()

    async def report(self, **more: Any) -> float:
        """Report the workers. Returns the reported age."""
        age_s = time.monotonic() - self.launched
        rentals = tuple(Rental(worker=worker, age_s=age_s, **more) for worker in self.workers)
        body = PoolReport(pool=self.name, model="m", process=self.process, rentals=rentals)
        await self.api.bus.call(subjects.REPORT_POOL, body)
        return age_s

    async def cost(self) -> float:
        return await of_pool(self.api, self.name)


async def of_pool(api: Harness, pool: str | None) -> float:
    pools = (await api.bus.call(subjects.GET_COST, GetCost())).pools
    return next((one.gpu_seconds for one in pools if one.pool == pool), 0.0)


async def steps_cost_nothing(api: Harness, step: Callable[[float], None]) -> None:
    """Check two workers of a pool and one without a pool, while the store's wall clock steps to and fro."""
    pool = Pool(api)
    before = await api.bus.call(subjects.GET_COST, GetCost())
    nobodys = await of_pool(api, None)
    began = time.monotonic()
    alone = await api.worker(new_id("m"))

    async def is_followed() -> bool:
        return (await of_pool(api, None)) > nobodys

    await eventually(is_followed, PATIENCE_S)
    first = await api.bus.call(subjects.GET_COST, GetCost())
    await pool.report()
    for step_s in (HOUR_S, 0.0, DAYS_40_S, -HOUR_S, 0.0):
        step(step_s)
        await asyncio.sleep(0.2)
        await pool.report()
        await api.renew(alone, "m")
        await asyncio.sleep(0.2)
    age_s = await pool.report(ended_ago_s=0.0)
    assert await pool.cost() == pytest.approx(2 * age_s, abs=0.01)
    assert await of_pool(api, None) - nobodys <= time.monotonic() - began
    after = await api.bus.call(subjects.GET_COST, GetCost())
    # Only the time before the first look at the worker without a pool is an estimate.
    assert after.estimated_gpu_seconds == first.estimated_gpu_seconds >= before.estimated_gpu_seconds


async def test_steps_of_the_clock_cost_nothing(settings: Settings) -> None:
    """Incident: an hour added 7,200 GPU-seconds to the cost of two workers, 40 days 6.9 million."""
    clock = SteppingClock()

    def step(step_s: float) -> None:
        clock.step_s = step_s

    async with Store.running(settings, clock), Harness.connected(settings) as api:
        await steps_cost_nothing(api, step)


@pytest.mark.skipif(LIBFAKETIME is None, reason="libfaketime is not installed (on Debian: faketime)")
async def test_steps_of_a_process_own_clock_cost_nothing(settings: Settings, tmp_path: Path) -> None:
    offset = tmp_path / "offset"
    offset.write_text("+0")

    def step(step_s: float) -> None:
        new = tmp_path / "new"
        new.write_text(f"{step_s:+.0f}")
        new.replace(offset)

    variables = {
        "LD_PRELOAD": str(LIBFAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    async with Process.running(settings, variables=variables), Harness.connected(settings) as api:
        await steps_cost_nothing(api, step)
        step(DAYS_40_S)
        at = (await api.bus.call(subjects.GET_COST, GetCost())).at
        # The step was real for the process.
        assert at - time.time() > DAYS_40_S - HOUR_S


async def test_a_step_of_40_days_removes_neither_sessions_nor_chunks(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, rounds = SteppingClock(), CompletedCalls(monkeypatch, Retention, "purge")
    async with Store.running(settings, clock), Harness.connected(settings) as api:
        watched, paused, ended = [await api.running(new_id("m")) for _ in range(3)]
        for record in (watched, paused, ended):
            await api.chunk(record, 0)
        await api.pause(paused.id)
        await api.end(ended.id)
        seen = Playhead(session=watched.id, playhead_s=1.0, viewers=1)
        await api.bus.publish(subjects.PLAYHEAD, watched.id, seen)
        await eventually(lambda: heard(api, watched.id), PATIENCE_S)

        clock.step_s = DAYS_40_S
        # A read at this very moment finds that it was watched just now.
        unwatched_s = (await api.get(watched.id)).unwatched_s
        assert unwatched_s is not None
        assert unwatched_s < 60.0
        await rounds.more(5)
        assert (await api.get(watched.id)).phase is Phase.ACTIVE
        assert (await api.get(paused.id)).phase is Phase.SUSPENDED
        assert (await api.get(ended.id)).phase.ended
        assert await last_entry(api.bus, subjects.CHUNKS, subjects.CHUNK.of(ended.id)) is not None
        # A worker's renewals are recognized after the clock was set back.
        worker = watched.worker or ""
        await api.renew(worker, watched.model)
        before = await renewed_at(api, worker)
        clock.step_s = 0.0
        await api.renew(worker, watched.model)
        assert await renewed_at(api, worker) > before
    # Restarted while the clock is wrong.
    clock.step_s = DAYS_40_S
    async with Store.running(settings, clock), Harness.connected(settings) as api:
        await rounds.more(5)
        assert (await api.get(paused.id)).phase is Phase.SUSPENDED
        assert await last_entry(api.bus, subjects.CHUNKS, subjects.CHUNK.of(ended.id)) is not None


async def heard(api: Harness, session: str) -> bool:
    return (await api.get(session)).playhead_s == 1.0


async def renewed_at(api: Harness, worker: str) -> float:
    page = await api.bus.call(subjects.LIST_WORKERS, ListWorkers())
    return next(one.renewed_at for one in page.workers if one.id == worker)


async def test_an_autoscaler_that_was_replaced_adds_nothing_any_more(settings: Settings) -> None:
    async with Store.running(settings), Harness.connected(settings) as api:
        pool = Pool(api)
        first, launched = pool.process, pool.launched
        age_s = await pool.report()
        answered = time.monotonic()
        pool.process, pool.launched = new_id("asc"), time.monotonic()
        await asyncio.sleep(0.3)
        found_s = await pool.report()
        # The store measures the time between the two, from the arrival of the last report.
        least, most = pool.launched + found_s - answered + age_s, time.monotonic() - launched
        counted = await pool.cost()
        assert 2 * least <= counted <= 2 * most
        pool.process, pool.launched = first, launched - 1_000.0
        await pool.report()
        assert await pool.cost() == counted


async def test_what_was_counted_wrongly_is_corrected_with_a_reason(settings: Settings) -> None:
    async with Store.running(settings), Harness.connected(settings) as api:
        pool = Pool(api)
        pool.launched -= 100.0
        await pool.report()
        record = await api.running(new_id("m"))

        async def correct(**values: Any) -> Any:
            request = {"id": new_id("cor"), "reason": "the clock was wrong", "by": "ops", **values}
            return await api.bus.call(subjects.CORRECT_COST, CorrectCost.model_validate(request))

        before = await api.bus.call(subjects.GET_COST, GetCost(tenant="acme"))
        made = await correct(id="cor_1", gpu_seconds=-150.0, money=-20.0)
        assert await correct(id="cor_1", gpu_seconds=-150.0, money=-20.0) == made
        with pytest.raises(ConflictError):
            await correct(id="cor_1", gpu_seconds=-151.0)
        await correct(session=record.id, money=5.0, reason="a gift")
        report = await api.bus.call(subjects.GET_COST, GetCost(tenant="acme"))
        assert (report.corrected.gpu_seconds, report.corrected.money) == (-150.0, -15.0)
        parts = (report.used, report.idle, report.corrected)
        assert report.total.gpu_seconds == pytest.approx(sum(part.gpu_seconds for part in parts))
        assert report.total.gpu_seconds <= before.total.gpu_seconds - 100.0
        # A tenant sees the corrections of its own sessions, an operator all of them.
        assert [one.reason for one in report.corrections] == ["a gift"]
        everything = await api.bus.call(subjects.GET_COST, GetCost(tenant="acme", every_correction=True))
        assert [one.reason for one in everything.corrections] == ["a gift", "the clock was wrong"]
        share = next(one for one in report.sessions if one.session == record.id)
        assert share.corrected_money == 5.0
        for wrong in ({"gpu_seconds": -1e9}, {"session": record.id, "money": -1e6}):
            with pytest.raises(InvalidInputError, match="would leave -"):
                await correct(**wrong)
        with pytest.raises(SessionNotFoundError):
            await correct(session="ses_none", money=1.0)

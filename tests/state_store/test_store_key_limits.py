"""The limits of one API key, on a store with real servers and with servers in memory."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from tests.helpers.one_day import on_one_day
from tests.helpers.waiting import eventually
from tests.state_store.state_store_harness import Harness
from turboserve import subjects
from turboserve.contracts.cost import Rental
from turboserve.contracts.errors import KeyQuotaError, NotFoundError
from turboserve.contracts.keys import ChangeKey, CreateKey, GetValidKeys, KeyLimits, KeyRecord
from turboserve.contracts.pool import PoolReport
from turboserve.contracts.sessions import Phase
from turboserve.contracts.usage import BY_DAY, ListUsage, UsageDay, UsageDimension, UsageGroup
from turboserve.contracts.workers import Playhead
from turboserve.ids import new_id, random_token
from turboserve.state_store.settings import Settings

SERVERS = ("real", "memory")
CHUNK_S = 0.75
"""Playing time of a chunk of `Harness.chunk`, seconds."""
GPUS = 100.0
"""A worker of a hundred GPUs, so that a moment is worth many seconds."""


@pytest.fixture(scope="module")
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"cost_sample_s": 0.1})


async def key(api: Harness, **limits: Any) -> str:
    request = CreateKey(
        id=new_id("key"),
        tenant="acme",
        scopes=("sessions:write",),
        hash=random_token(32),
        limits=KeyLimits(**limits),
    )
    return (await api.bus.call(subjects.CREATE_KEY, request)).key.id


async def change(api: Harness, name: str, **limits: Any) -> KeyRecord:
    request = ChangeKey(key=name, changes=tuple(limits), limits=KeyLimits(**limits))
    return await api.bus.call(subjects.CHANGE_KEY, request)


async def refused(work: Awaitable[Any], field: str) -> KeyQuotaError:
    with pytest.raises(KeyQuotaError) as caught:
        await work
    assert caught.value.field == field
    assert (caught.value.retry_after_s or 0.0) > 0
    return caught.value


async def test_a_session_counts_for_the_key_that_created_it(api: Harness) -> None:
    model, ours, theirs = new_id("m"), await key(api, sessions=2, slots=1), await key(api)
    await api.worker(model, capacity=9)
    first = await api.create(model, key=ours)
    assert (await refused(api.create(model, key=ours), "key_slots")).limit == 1
    await api.create(model, key=theirs)
    await api.create(model)
    await api.pause(first.id)
    second = await api.create(model, key=ours)
    await refused(api.resume(first.id), "key_slots")
    await api.pause(second.id)
    await refused(api.create(model, key=ours), "key_sessions")
    # A repeat of an answered creation is no creation.
    assert (await api.create(model, key=ours, id=first.id)).id == first.id
    await api.end(first.id)
    await api.create(model, key=ours)


async def test_a_change_holds_from_the_next_request_on(api: Harness) -> None:
    model, ours = new_id("m"), await key(api, slots=1, weight=0.5)
    await api.worker(model, capacity=9)
    first = await api.create(model, key=ours)
    assert first.weight == 0.5
    await refused(api.create(model, key=ours), "key_slots")
    version = (await api.bus.call(subjects.GET_VALID_KEYS, GetValidKeys())).version
    assert (await change(api, ours, slots=2, weight=3.0)).limits == KeyLimits(slots=2, weight=3.0)
    valid = await api.bus.call(subjects.GET_VALID_KEYS, GetValidKeys(version=version))
    assert {one.id: one.limits.slots for one in valid.keys or ()}[ours] == 2
    assert (await api.create(model, key=ours)).weight == 3.0
    await api.pause(first.id)
    assert (await api.resume(first.id)).weight == 3.0
    await change(api, ours, slots=None)
    await asyncio.gather(*(api.create(model, key=ours) for _ in range(4)))
    with pytest.raises(NotFoundError):
        await change(api, "no-such-key", slots=1)


@pytest.mark.usefixtures("standing_clock")
async def test_concurrent_requests_do_not_exceed_a_rate(api: Harness) -> None:
    model, ours = new_id("m"), await key(api, creations_per_minute=3, prompts_per_minute=2)
    await api.worker(model, capacity=40)
    made = await asyncio.gather(*(api.create(model, key=ours) for _ in range(12)), return_exceptions=True)
    created = [one for one in made if not isinstance(one, BaseException)]
    assert len(created) == 3
    assert {one.field for one in made if isinstance(one, KeyQuotaError)} == {"key_creations_per_minute"}
    left = sorted(rate.left for one in created for rate in one.rates if rate.name.startswith("key_"))
    assert left == [0, 1, 2]
    session = created[0].id
    receipts = await asyncio.gather(
        *(api.prompt(session, f"a star {n}") for n in range(6)), return_exceptions=True
    )
    assert sum(isinstance(one, KeyQuotaError) for one in receipts) == 4
    await refused(api.pause(session), "key_prompts_per_minute")
    # The rows and events have no rates: they belong to one answer.
    assert (await api.get(session)).rates == ()


@on_one_day
async def test_a_spent_budget_refuses_creations_and_resumptions_and_ends_nothing(api: Harness) -> None:
    model, ours, worker = new_id("m"), await key(api, gpu_seconds_per_day=30.0), new_id("wk")
    pool, launched = new_id("p"), time.monotonic()

    async def told() -> None:
        rental = Rental(
            worker=worker, kind="t", gpus=GPUS, age_s=time.monotonic() - launched, ready_ago_s=0.0
        )
        report = PoolReport(pool=pool, model=model, maximum=0, process="asc", rentals=(rental,))
        await api.bus.call(subjects.REPORT_POOL, report)

    await told()
    await api.renew(worker, model, 9)
    paused = await api.create(model, key=ours)
    [budget] = [rate for rate in paused.rates if rate.name == "key_gpu_seconds_per_day"]
    assert (budget.limit, budget.left) == (30.0, 30.0)
    await api.pause(paused.id)
    running = await api.place(await api.create(model, key=ours), worker)

    async def spent() -> bool:
        await told()
        [made] = await asyncio.gather(api.create(model, key=ours), return_exceptions=True)
        if isinstance(made, KeyQuotaError):
            return True
        assert not isinstance(made, BaseException)
        await api.end(made.id)
        return False

    await eventually(spent)
    await refused(api.create(model, key=ours), "key_gpu_seconds_per_day")
    error = await refused(api.resume(paused.id), "key_gpu_seconds_per_day")
    assert (error.retry_after_s or 0.0) <= 86_400.0
    assert (await api.get(running.id)).phase is Phase.ACTIVE
    await api.create(model, key=await key(api))
    await change(api, ours, gpu_seconds_per_day=1e9)
    await api.resume(paused.id)


@on_one_day
async def test_usage_is_counted_by_day_tenant_and_key(api: Harness) -> None:
    model, ours, worker, tenant = new_id("m"), await key(api), new_id("wk"), new_id("t")
    pool, launched = new_id("p"), time.monotonic()
    await api.renew(worker, model, 9, pool_member="m-0")
    mine = await api.place(await api.create(model, tenant=tenant, key=ours), worker)
    other = await api.place(await api.create(model, tenant=tenant), worker)
    for session, viewers in ((mine, 3), (other, 1)):
        message = Playhead(
            session=session.id,
            gateway="g",
            playhead_s=1.0,
            viewers=viewers,
            viewer_s=viewers,
            delivered_bytes=viewers * 1_000,
        )
        await api.bus.publish(subjects.PLAYHEAD, session.id, message)
    for index in range(4):
        await api.chunk(mine, index)

    reported_s = 0.0

    async def counted() -> bool:
        nonlocal reported_s
        reported_s = time.monotonic() - launched
        rental = Rental(worker=worker, kind="t", gpus=GPUS, age_s=reported_s, ready_ago_s=0)
        report = PoolReport(pool=pool, model=model, maximum=0, process="asc", rentals=(rental,))
        await api.bus.call(subjects.REPORT_POOL, report)
        page = await api.bus.call(subjects.LIST_USAGE, ListUsage(tenant=tenant, from_day=0, to_day=30_000))
        by_key = {day.key: day for day in page.days}
        if by_key.keys() != {ours, None}:
            return False
        one, two = by_key[ours], by_key[None]
        return (
            (one.viewer_seconds, two.viewer_seconds) == (3.0, 1.0)
            and (one.delivered_bytes, two.delivered_bytes) == (3_000, 1_000)
            and (one.chunks, two.chunks) == (4, 0)
            and one.video_seconds == pytest.approx(4 * CHUNK_S)
            and one.gpu_seconds > 0
            and two.gpu_seconds > 0
        )

    async def all_shared() -> bool:
        page = await api.bus.call(subjects.LIST_USAGE, ListUsage(tenant=tenant, from_day=0, to_day=30_000))
        return sum(day.gpu_seconds for day in page.days) == pytest.approx(GPUS * reported_s)

    await eventually(counted)
    # The time of the last report is shared at the next look.
    await eventually(all_shared)
    first = await api.bus.call(
        subjects.LIST_USAGE, ListUsage(tenant=tenant, from_day=0, to_day=30_000, limit=1)
    )
    rest = await api.bus.call(
        subjects.LIST_USAGE, ListUsage(tenant=tenant, from_day=0, to_day=30_000, after=first.next)
    )
    assert [day.key for day in (*first.days, *rest.days)] == [None, ours]
    assert rest.next is None
    await check_sums(api, tenant, [*first.days, *rest.days])


async def check_sums(api: Harness, tenant: str, days: list[UsageDay]) -> None:
    """Check that all sums of `days`, read one by one, are those of the rows. Nothing is counted meanwhile."""
    for number in range(1, 4):
        for names in itertools.combinations(BY_DAY, number):
            request = ListUsage(tenant=tenant, from_day=0, to_day=30_000, limit=1, group_by=names)
            groups: list[UsageGroup] = []
            while True:
                page = await api.bus.call(subjects.LIST_USAGE, request)
                assert page.days == ()
                assert len(page.groups) == 1
                groups += page.groups
                if page.next is None:
                    break
                request = request.model_copy(update={"after": page.next})
            wanted: dict[tuple[object, ...], list[UsageDay]] = {}
            for day in days:
                wanted.setdefault(tuple(getattr(day, name) for name in names), []).append(day)
            assert {tuple(getattr(group, name) for name in names) for group in groups} == wanted.keys()
            for group in groups:
                summed = wanted[tuple(getattr(group, name) for name in names)]
                assert group.model_fields_set >= {"chunks", "delivered_bytes"}
                assert group.chunks == sum(day.chunks for day in summed)
                assert group.delivered_bytes == sum(day.delivered_bytes for day in summed)
                for name in ("gpu_seconds", "money", "video_seconds", "viewer_seconds"):
                    assert getattr(group, name) == pytest.approx(sum(getattr(day, name) for day in summed))
                assert [name for name in UsageDimension if name not in names and getattr(group, name)] == []

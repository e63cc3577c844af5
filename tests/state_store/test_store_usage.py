"""Use by viewers: no claim of a gateway exceeds what answers can carry, and an orderly stop loses none."""

from __future__ import annotations

import asyncio
import time

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from pydantic import ValidationError

from tests.state_store.state_store_harness import Harness, Store
from turboserve import subjects
from turboserve.clock import SystemClock
from turboserve.contracts.base import NUMBER_LIMIT
from turboserve.contracts.usage import HOURS, ListUsage, UsageDimension
from turboserve.contracts.workers import DELIVERED_LIMIT, Playhead
from turboserve.ids import new_id
from turboserve.instruments import ObservedGauge
from turboserve.state_store.core.tenants import hour_of
from turboserve.state_store.periodic_writes import ViewerUsage
from turboserve.state_store.ports.database import Database
from turboserve.state_store.ports.records import UsageShare, ViewerUse
from turboserve.state_store.service.pools import Pools
from turboserve.state_store.settings import Settings
from turboserve.telemetry_names import MODEL, TENANT

SERVERS = ("memory",)


async def test_counts_stop_at_the_greatest_that_an_answer_carries(database: Database) -> None:
    """Incident: two messages with greater sums ended every state store, and each restart after that."""
    most = UsageShare("acme", None, "m", chunks=NUMBER_LIMIT, delivered_bytes=NUMBER_LIMIT)
    other = UsageShare("acme", "k1", "m", delivered_bytes=NUMBER_LIMIT)
    for _ in range(2):
        async with database.transaction() as db:
            await db.progress.add_usage(7 * HOURS, [most, most, other])
    async with database.statement() as db:
        page = await db.rentals.usage(ListUsage(from_day=0, to_day=9))
        request = ListUsage(from_day=0, to_day=9, group_by=(UsageDimension.TENANT,))
        groups = (await db.rentals.usage(request)).groups
    assert [(day.chunks, day.delivered_bytes) for day in page.days] == [
        (NUMBER_LIMIT, NUMBER_LIMIT),
        (0, NUMBER_LIMIT),
    ]
    assert [(group.chunks, group.delivered_bytes) for group in groups] == [(NUMBER_LIMIT, NUMBER_LIMIT)]


async def test_usage_is_kept_by_hour_and_model_beside_the_days(database: Database) -> None:
    day, tenant = 40, new_id("t")
    first, last = day * HOURS, (day + 1) * HOURS - 1
    async with database.transaction() as db:
        small = UsageShare(tenant, None, "m_64x64", chunks=2)
        await db.progress.add_usage(first, [UsageShare(tenant, None, "m", chunks=1), small])
        await db.progress.add_usage(last, [small])
        await db.progress.add_usage(last + 1, [small])

    async def sums(*names: str, to_day: int = day) -> list[tuple[object, ...]]:
        dimensions = tuple(map(UsageDimension, names))
        request = ListUsage(tenant=tenant, from_day=day, to_day=to_day, limit=1, group_by=dimensions)
        found: list[tuple[object, ...]] = []
        while True:
            async with database.statement() as db:
                page = await db.rentals.usage(request)
            found += [(*(getattr(one, name) for name in names), one.chunks) for one in page.groups]
            if page.next is None:
                return found
            request = request.model_copy(update={"after": page.next})

    assert await sums("day", "hour", "model") == [
        (day, first, "m", 1),
        (day, first, "m_64x64", 2),
        (day, last, "m_64x64", 2),
    ]
    assert await sums("model") == [("m", 1), ("m_64x64", 4)]
    assert await sums("day", to_day=day + 1) == [(day, 5), (day + 1, 2)]
    assert await sums("day", "model", to_day=day + 1) == [
        (day, "m", 1),
        (day, "m_64x64", 4),
        (day + 1, "m_64x64", 2),
    ]
    async with database.transaction() as db:
        await db.rentals.forget_usage(day + 1)
    assert await sums("hour", to_day=day + 1) == [(last + 1, 2)]
    assert await sums("day", to_day=day + 1) == [(day + 1, 2)]


async def test_metrics_have_todays_usage_by_tenant_and_model(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, tenant, now = SystemClock(), new_id("t"), time.time()
    # It is the same day all the time.
    monkeypatch.setattr(SystemClock, "wall", lambda _: now)
    reader = InMemoryMetricReader()
    gauge = ObservedGauge(MeterProvider([reader]).get_meter("test"), "used", "1", "", TENANT, MODEL)
    pools = Pools(database, clock, settings)
    gauge.add(pools, lambda pools: pools.used_today("chunks"))
    hour = hour_of(now)
    async with database.transaction() as db:
        for model, chunks in (("m", 1), ("m_64x64", 2), ("m", 4)):
            await db.progress.add_usage(hour, [UsageShare(tenant, "k", model, chunks=chunks)])
    await pools.measure_usage()
    data = reader.get_metrics_data()
    assert data is not None
    [metric] = data.resource_metrics[0].scope_metrics[0].metrics
    found = {tuple((point.attributes or {}).values()): point.value for point in metric.data.data_points}  # type: ignore[union-attr]
    assert (found[tenant, "m"], found[tenant, "m_64x64"]) == (5, 2)


def test_a_message_claims_no_more_than_a_gateway_sends() -> None:
    with pytest.raises(ValidationError):
        Playhead(session="ses_a", playhead_s=0.0, viewers=1, delivered_bytes=DELIVERED_LIMIT + 1)
    most = ViewerUse(0.0, NUMBER_LIMIT)
    assert most + most == most


async def test_an_orderly_stop_writes_what_viewers_have_used(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, add = asyncio.Event(), ViewerUsage.add

    def noted(usage: ViewerUsage, report: Playhead) -> None:
        add(usage, report)
        taken.set()

    monkeypatch.setattr(ViewerUsage, "add", noted)
    model, tenant = new_id("m"), new_id("t")
    async with Harness.connected(settings) as api:
        async with Store.running(settings):
            await api.worker(model)
            session = (await api.create(model, tenant=tenant)).id
            message = Playhead(session=session, playhead_s=1.0, viewers=1, viewer_s=2.0, delivered_bytes=9)
            await api.bus.publish(subjects.PLAYHEAD, session, message)
            await taken.wait()
        async with Store.running(settings):
            page = await api.bus.call(
                subjects.LIST_USAGE, ListUsage(tenant=tenant, from_day=0, to_day=30_000)
            )
    assert [(day.viewer_seconds, day.delivered_bytes) for day in page.days] == [(2.0, 9)]

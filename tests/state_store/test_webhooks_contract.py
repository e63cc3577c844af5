"""Rows of webhooks and deliveries: the same in Postgres and in the database in memory."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.helpers.virtual_clock import VirtualClock
from tests.state_store.database_servers import DatabaseServer
from turboserve.contracts.events import PromptAccepted, SessionCreated, WorkerJoined
from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.contracts.webhooks import (
    DeliveryRecord,
    DeliveryState,
    ListDeliveries,
    ReportDelivery,
    TakeDeliveries,
    WebhookRecord,
)
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.simulation.runtime.rows import webhooks as memory
from turboserve.state_store.core.webhooks import holds_back
from turboserve.state_store.ports.database import Database
from turboserve.state_store.repository import webhooks as repository
from turboserve.state_store.service import webhooks as service
from turboserve.state_store.settings import Settings

SALT = "0" * 32


def webhook(name: str, tenant: str = "acme", **fields: Any) -> WebhookRecord:
    values = {"id": name, "tenant": tenant, "url": "https://a.example/", "salt": SALT, "created_at": 10.0}
    return WebhookRecord.model_validate(values | fields)


def session(name: str, tenant: str = "acme") -> SessionRecord:
    return SessionRecord.model_validate(
        {
            "id": name,
            "tenant": tenant,
            "model": "m",
            "prompt": "p",
            "seed": 1,
            "phase": Phase.REQUESTED,
            "activity": Activity.WATCHING,
            "version": 1,
            "epoch": 0,
            "created_at": 20.0,
            "updated_at": 20.0,
        }
    )


def created(event: str, name: str = "s1", tenant: str = "acme", at: float = 20.0) -> SessionCreated:
    return SessionCreated(id=event, at=at, record=session(name, tenant))


async def commit(database: Database, *events: Any) -> None:
    """Commit events and remove them from the outbox, as the publisher does."""
    async with database.transaction() as db:
        await db.outbox.add(events)
    async with database.statement() as db:
        numbers = [event.number for event in await db.outbox.oldest(100)]
    async with database.statement() as db:
        await db.outbox.remove(numbers)


async def insert(database: Database, *records: WebhookRecord) -> None:
    async with database.transaction() as db:
        for record in records:
            await db.webhooks.insert(record)


async def listed(database: Database, name: str, **options: Any) -> list[DeliveryRecord]:
    request = ListDeliveries(webhook=name, tenant="acme", **options)
    async with database.statement() as db:
        return list((await db.webhooks.page(request)).deliveries)


async def test_events_become_deliveries_of_those_who_want_them(database: Database) -> None:
    await insert(
        database,
        webhook("all"),
        webhook("prompts", types=("prompt.*",)),
        webhook("one", types=("session.created",)),
        webhook("off", enabled=False),
        webhook("late", created_at=30.0),
        webhook("foreign", "other"),
    )
    prompt = PromptAccepted(
        id="ev2", at=21.0, record=session("s1"), prompt_id="p1", control_seq=1, prompt="\\u0000 ' $1"
    )
    worker = WorkerRecord.model_validate(
        {"id": "w", "model": "m", "kind": "cpu", "capacity": 1, "phase": WorkerPhase.READY, "started_at": 1.0}
        | {"renewed_at": 1.0}
    )
    await commit(database, created("ev1"), prompt, WorkerJoined(id="ev3", at=22.0, worker=worker))
    found = {
        name: [one.event for one in await listed(database, name)]
        for name in ("all", "prompts", "one", "off", "late", "foreign")
    }
    wanted = {"all": ["ev2", "ev1"], "prompts": ["ev2"], "one": ["ev1"]}
    assert found == wanted | {key: [] for key in ("off", "late", "foreign")}
    async with database.statement() as db:
        assert await db.outbox.oldest(10) == []
        [due, _] = await db.webhooks.due([("all", 5)], 50.0) + await db.webhooks.due([("prompts", 5)], 50.0)
    assert (due.record.event, due.record.session, due.record.type) == ("ev1", "s1", "session.created")
    assert SessionCreated.from_bytes(due.body.encode()) == created("ev1")


async def test_a_crash_between_publication_and_removal_makes_no_second_delivery(database: Database) -> None:
    await insert(database, webhook("all"))
    await commit(database, created("ev1"))
    # A crash of Postgres may bring the event back, after its delivery was stored.
    await commit(database, created("ev1"))
    assert [one.event for one in await listed(database, "all")] == ["ev1"]


async def test_two_senders_share_without_overlap(server: DatabaseServer, database: Database) -> None:
    await insert(database, webhook("a"), webhook("b"))
    await commit(database, *(created(f"ev{number}", f"s{number}") for number in range(6)))
    taken: list[tuple[str, str]] = []
    for sender in (database, server.connect()):
        async with sender.transaction() as db:
            ready = await db.webhooks.ready(100.0, 10)
            assert [one.id for one in ready] == ["a", "b"]
            due = await db.webhooks.due([("a", 3), ("b", 3)], 100.0)
            # Turns: one of each webhook before the second of any.
            assert [one.record.webhook for one in due] == ["a", "b"] * 3
            await db.webhooks.claim([one.number for one in due], "c", 160.0, 100.0)
        taken += [(one.record.webhook, one.record.event) for one in due]
    assert len(set(taken)) == 12
    async with database.transaction() as db:
        assert await db.webhooks.ready(159.0, 10) == []
        assert await db.webhooks.claimed(["acme", "none"], 159.0) == {"acme": {"a": 6, "b": 6}, "none": {}}
        # Both senders have died.
        assert len(await db.webhooks.due([("a", 9), ("b", 9)], 160.0)) == 12


async def test_a_tenant_with_slow_receivers_leaves_places_to_others(database: Database) -> None:
    await insert(database, webhook("a"), webhook("b"), webhook("other", tenant="umbrella"))
    await commit(database, *(created(f"ev{number}", f"s{number}") for number in range(9)))
    webhooks = service.Webhooks(
        database, VirtualClock(100.0, 0.0), Settings(webhook_concurrency=8, webhook_tenant_concurrency=5)
    )
    taken = [(await webhooks.take(TakeDeliveries(limit=3))).deliveries for _ in range(3)]
    assert [len(one) for one in taken] == [3, 2, 0]
    assert {one.webhook for one in taken[0]} == {"a", "b"}
    await commit(database, created("ev9", tenant="umbrella"))
    [delivery] = (await webhooks.take(TakeDeliveries(limit=3))).deliveries
    assert delivery.webhook == "other"


async def test_the_slow_webhooks_of_a_tenant_hold_up_no_other_of_it(database: Database) -> None:
    """All places of the tenant are taken, by webhooks with a backlog."""
    await insert(database, webhook("slow"), webhook("quick", types=("prompt.*",)))
    await commit(database, *(created(f"ev{number}", f"s{number}") for number in range(9)))
    clock = VirtualClock(100.0, 0.0)
    webhooks = service.Webhooks(database, clock, Settings(webhook_tenant_concurrency=4))
    first = (await webhooks.take(TakeDeliveries(limit=8))).deliveries
    assert [one.webhook for one in first] == ["slow"] * 4
    prompt = PromptAccepted(
        id="prompt", at=90.0, record=session("s1"), prompt_id="p1", control_seq=1, prompt="p"
    )
    await commit(database, prompt)
    ended = first[0]
    await webhooks.report(
        ReportDelivery(claim=ended.claim, webhook=ended.webhook, event=ended.event, status=200)
    )
    clock.advance(1.0)
    [next_one] = (await webhooks.take(TakeDeliveries(limit=8))).deliveries
    assert next_one.webhook == "quick"


async def test_a_request_counts_the_attempts_of_one_that_runs_at_the_same_time(
    server: DatabaseServer, database: Database
) -> None:
    await insert(database, webhook("a"), webhook("b"))
    await commit(database, *(created(f"ev{number}", f"s{number}") for number in range(3)))
    other = server.connect()

    async def count() -> dict[str, dict[str, int]]:
        async with other.transaction() as db:
            await db.webhooks.lock_tenants(["acme"])
            return await db.webhooks.claimed(["acme"], 100.0)

    async with database.transaction() as db:
        await db.webhooks.lock_tenants(["umbrella", "acme"])
        due = await db.webhooks.due([("a", 3)], 100.0)
        counting = asyncio.create_task(count())
        # Without the lock it ends here, before the claims are committed.
        await asyncio.wait([counting], timeout=0.2)
        await db.webhooks.claim([one.number for one in due], "c", 160.0, 100.0)
    assert await counting == {"acme": {"a": 3}}


async def test_webhooks_take_turns(database: Database) -> None:
    await insert(database, webhook("a"), webhook("b"), webhook("c"))
    await commit(database, *(created(f"ev{number}", f"s{number}") for number in range(3)))
    order = []
    for now in (100.0, 101.0, 102.0, 103.0):
        async with database.transaction() as db:
            [first] = await db.webhooks.ready(now, 1)
            [due] = await db.webhooks.due([(first.id, 1)], now)
            await db.webhooks.claim([due.number], "c", 200.0, now)
            order.append(first.id)
    assert order == ["a", "b", "c", "a"]


async def test_webhooks_with_nothing_to_send_hold_up_no_other(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All events of `a` and `b` that are due wait for one that has failed."""
    monkeypatch.setattr(service, "READY_LIMIT", 2)
    await insert(database, webhook("a"), webhook("b"), webhook("c", types=("prompt.*",)))
    prompt = PromptAccepted(
        id="ev3", at=21.0, record=session("s1"), prompt_id="p1", control_seq=1, prompt="p"
    )
    await commit(database, created("ev1"), created("ev2"), prompt)
    async with database.transaction() as db:
        for name in ("a", "b"):
            found = await db.webhooks.delivery(name, "ev1")
            assert found is not None
            await db.webhooks.write_delivery(found[0].model_copy(update={"attempts": 1, "due_at": 1e9}))
    webhooks = service.Webhooks(database, VirtualClock(100.0, 0.0), Settings())
    assert (await webhooks.take(TakeDeliveries(limit=8))).deliveries == ()
    [taken] = (await webhooks.take(TakeDeliveries(limit=8))).deliveries
    assert (taken.webhook, taken.event) == ("c", "ev3")


async def test_the_order_of_a_session_is_that_of_the_rule(database: Database) -> None:
    draw = random.Random(7)
    await insert(database, webhook("all"))
    await commit(database, *(created(f"ev{number:02}", draw.choice("xyz")) for number in range(40)))
    for one in await listed(database, "all"):
        done = draw.random() < 0.3
        state = DeliveryState.DELIVERED if done else DeliveryState.WAITING
        update = {"attempts": draw.randrange(7), "state": state, "due_at": draw.choice([20.0, 500.0])}
        async with database.transaction() as db:
            await db.webhooks.write_delivery(one.model_copy(update=update))
    rows = list(enumerate(reversed(await listed(database, "all"))))
    waiting = [_Queued(number, row) for number, row in rows if row.state is DeliveryState.WAITING]
    wanted = {
        one.row.event
        for one in waiting
        if one.row.due_at <= 100.0 and not any(holds_back(other, one) for other in waiting)
    }
    async with database.statement() as db:
        found = await db.webhooks.due([("all", 100)], 100.0)
    assert wanted
    assert {one.record.event for one in found} == wanted


class _Queued:
    def __init__(self, number: int, row: DeliveryRecord) -> None:
        self.number, self.row = number, row
        self.session, self.attempts = row.session, row.attempts


async def test_purge_bounds_what_is_kept(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    await insert(database, webhook("a"), webhook("b"))
    await commit(database, *(created(f"ev{number}", f"s{number}") for number in range(5)))
    async with database.transaction() as db:
        found = await db.webhooks.delivery("a", "ev0")
        assert found is not None
        done = {"state": DeliveryState.DELIVERED, "finished_at": 30.0}
        await db.webhooks.write_delivery(found[0].model_copy(update=done))
    async with database.transaction() as db:
        purged = await db.webhooks.purge(40.0, 3, 50.0)
    assert (purged.deleted, purged.given_up) == (1, 3)
    for name, failed in (("a", ["ev1"]), ("b", ["ev1", "ev0"])):
        ended = await listed(database, name, state=DeliveryState.FAILED)
        assert [one.event for one in ended] == failed
        assert all(one.finished_at == 50.0 and one.error for one in ended)
    async with database.transaction() as db:
        await db.webhooks.delete("b")
    assert await listed(database, "b") == []
    async with database.transaction() as db:
        await db.webhooks.give_up("a", "disabled", 60.0)
        # A delivery that ended after it was read, and before it was claimed, stays ended.
        await db.webhooks.claim([9], "c", 99.0, 60.0)
    assert await listed(database, "a", state=DeliveryState.WAITING) == []
    async with database.transaction() as db:
        found = await db.webhooks.delivery("a", "ev4")
    assert found is not None
    assert found[1] is None
    # However few rows one statement changes, all end. `b` was deleted while the outbox knew it.
    for module in (memory, repository, service):
        monkeypatch.setattr(module, "PURGE_ROWS", 2)
    async with database.transaction() as db:
        for number in range(5):
            one = found[0].model_copy(update={"webhook": "b", "event": f"old{number}"})
            await db.webhooks.deliver(one, "{}")
    await commit(database, *(created(f"new{number}") for number in range(7)))
    settings = Settings(webhook_backlog=2, webhook_retention_s=10.0)
    await service.Webhooks(database, VirtualClock(1_000.0, 0.0), settings).purge()
    assert [one.event for one in await listed(database, "a", state=DeliveryState.WAITING)] == ["new6", "new5"]
    assert len(await listed(database, "a")) == 7
    assert await listed(database, "b") == []


async def test_a_webhook_is_read_and_changed(database: Database) -> None:
    record = webhook("a", label="x", types=("prompt.*",), created_by="k1")
    await insert(database, record, webhook("b"))
    changed = record.model_copy(
        update={"salt": "1" * 32, "previous_salt": SALT, "previous_until": 5.0, "failures": 2, "tenant": "no"}
    )
    async with database.transaction() as db:
        await db.webhooks.lock()
        assert await db.webhooks.get("a", lock=True) == record
        await db.webhooks.write(changed)
    async with database.statement() as db:
        found = await db.webhooks.of_tenant("acme")
    assert [one.id for one in found] == ["a", "b"]
    assert found[0] == changed.model_copy(update={"tenant": "acme"})

"""The limits of one tenant, on a store with real servers and with servers in memory."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.state_store.database_servers import DatabaseServer
from tests.state_store.state_store_harness import PATIENT, Harness, Process, Store
from turboserve.clock import SystemClock
from turboserve.contracts.errors import NoCapacityError, TenantLimitError
from turboserve.contracts.requests import CreateSession
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.ids import new_id
from turboserve.state_store.core import sessions as rules
from turboserve.state_store.core.change import Change
from turboserve.state_store.core.tenants import ROW_BYTES, created_bytes
from turboserve.state_store.ports.database import Database
from turboserve.state_store.settings import Settings

SERVERS = ("real", "memory")
Starts = Callable[..., Awaitable[Store]]


def tenant() -> str:
    """A tenant that no other test has used."""
    return new_id("t")


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings with only the limits that a test sets. A worker that renewed once stays."""
    names = [name for name in Settings.model_fields if name.startswith("tenant_")]
    patient = {**PATIENT, "worker_timeout_s": 3_600.0}
    return settings.model_copy(update={**dict.fromkeys(names, 0), **patient})


@asynccontextmanager
async def limited(start: Starts, settings: Settings, **limits: Any) -> AsyncIterator[Harness]:
    await start(**limits)
    async with Harness.connected(settings) as api:
        yield api


async def refused(work: Awaitable[Any], field: str) -> TenantLimitError:
    with pytest.raises(TenantLimitError) as caught:
        await work
    assert caught.value.field == field
    assert (caught.value.retry_after_s or 0.0) > 0
    return caught.value


async def test_sessions_that_have_not_ended(start_store: Starts, settings: Settings) -> None:
    async with limited(start_store, settings, tenant_sessions=2) as api:
        model, ours = new_id("m"), tenant()
        await api.worker(model, capacity=9)
        first = await api.create(model, tenant=ours)
        second = await api.create(model, tenant=ours)
        await api.pause(second.id)
        error = await refused(api.create(model, tenant=ours), "tenant_sessions")
        assert error.limit == 2
        # A repeat of an answered creation is no creation.
        again = await api.create(model, tenant=ours, id=first.id)
        assert again.id == first.id
        await api.create(model, tenant=tenant())
        await api.end(first.id)
        await api.create(model, tenant=ours)


async def test_create_and_pause_ends_at_the_suspended_ones(start_store: Starts, settings: Settings) -> None:
    async with limited(start_store, settings, tenant_suspended=2) as api:
        model, ours = new_id("m"), tenant()
        await api.worker(model, capacity=9)
        paused = []
        for _ in range(2):
            record = await api.create(model, tenant=ours)
            paused.append((await api.pause(record.id)).id)
        await refused(api.create(model, tenant=ours), "tenant_suspended")
        await api.create(model, tenant=tenant())
        await api.resume(paused[0])
        await api.create(model, tenant=ours)


async def test_slots_are_counted_over_all_models_and_at_resumption(
    start_store: Starts, settings: Settings
) -> None:
    async with limited(start_store, settings, tenant_slots=2) as api:
        one, two, ours = new_id("m"), new_id("m"), tenant()
        for model in (one, two):
            await api.worker(model, capacity=9)
        first = await api.create(one, tenant=ours)
        await api.pause(first.id)
        await api.create(one, tenant=ours)
        await api.create(two, tenant=ours)
        await refused(api.create(two, tenant=ours), "tenant_slots")
        await refused(api.resume(first.id), "tenant_slots")
        assert (await api.get(first.id)).phase is Phase.SUSPENDED
        other = await api.create(two, tenant=tenant())
        assert other.phase is Phase.REQUESTED


async def test_a_place_is_left_for_a_tenant_that_has_none(start_store: Starts, settings: Settings) -> None:
    async with limited(start_store, settings, tenant_slots_factor=3.0) as api:
        model, ours, theirs = new_id("m"), tenant(), tenant()
        await api.worker(new_id("m"))
        await api.worker(model, capacity=4)
        # Another tenant is known from its first request on, even if that was refused.
        full = new_id("m")
        await api.worker(full, capacity=1)
        await api.create(full, tenant=ours)
        with pytest.raises(NoCapacityError):
            await api.create(full, tenant=theirs)
        taken = [await api.create(model, tenant=ours) for _ in range(3)]
        await refused(api.create(model, tenant=ours), "tenant_slots_factor")
        last = await api.create(model, tenant=theirs)
        await api.pause(taken[0].id)
        await api.resume(taken[0].id)
        # All are taken. The place that the other tenant frees is not available to the greedy one.
        await api.end(last.id)
        await refused(api.create(model, tenant=ours), "tenant_slots_factor")
        await api.create(model, tenant=theirs)


@pytest.mark.usefixtures("standing_clock")
async def test_creations_per_minute(start_store: Starts, settings: Settings) -> None:
    async with limited(start_store, settings, tenant_creations_per_minute=2) as api:
        model, ours = new_id("m"), tenant()
        await api.worker(model, capacity=9)
        for _ in range(2):
            record = await api.create(model, tenant=ours)
            await api.end(record.id)
        error = await refused(api.create(model, tenant=ours), "tenant_creations_per_minute")
        assert (error.retry_after_s or 0.0) <= 30.0
        await api.create(model, tenant=tenant())


@pytest.mark.usefixtures("standing_clock")
async def test_prompts_per_minute_over_all_sessions(start_store: Starts, settings: Settings) -> None:
    async with limited(start_store, settings, tenant_prompts_per_minute=2) as api:
        model, ours = new_id("m"), tenant()
        await api.worker(model, capacity=9)
        one, two = [await api.create(model, tenant=ours) for _ in range(2)]
        receipt = await api.prompt(one.id, "first")
        await api.prompt(two.id, "second")
        before = await api.get(one.id)
        for session in (one.id, two.id):
            await refused(api.prompt(session, "third"), "tenant_prompts_per_minute")
        assert (await api.get(one.id)).version == before.version
        # A repeat gets its first receipt. It is not charged, so nothing is said of the rates.
        again = await api.prompt(one.id, "first", receipt.prompt_id)
        assert again == receipt.model_copy(update={"rates": ()})
        other = await api.create(model, tenant=tenant())
        await api.prompt(other.id, "first")


@pytest.mark.usefixtures("standing_clock")
async def test_pauses_count_as_prompts(start_store: Starts, settings: Settings) -> None:
    """Each writes an event with the whole record."""
    async with limited(start_store, settings, tenant_prompts_per_minute=1) as api:
        model, ours = new_id("m"), tenant()
        await api.worker(model, capacity=9)
        one, two = [await api.create(model, tenant=ours) for _ in range(2)]
        await api.pause(one.id)
        await api.resume(one.id)
        before = await api.get(two.id)
        await refused(api.pause(two.id), "tenant_prompts_per_minute")
        assert (await api.get(two.id)).version == before.version


async def test_stored_bytes(start_store: Starts, settings: Settings) -> None:
    async with limited(start_store, settings, tenant_stored_bytes=ROW_BYTES + 100) as api:
        model, ours = new_id("m"), tenant()
        await api.worker(model, capacity=9)
        record = await api.create(model, tenant=ours, prompt="x" * 40, metadata={"k": "v" * 39})
        await refused(api.create(model, tenant=ours, prompt="x" * 21), "tenant_stored_bytes")
        await api.prompt(record.id, "x" * 20)
        await refused(api.prompt(record.id, "x"), "tenant_stored_bytes")
        await api.end(record.id)
        # The text is kept for as long as the row is.
        await refused(api.create(model, tenant=ours, prompt="x"), "tenant_stored_bytes")


@pytest.mark.usefixtures("standing_clock")
async def test_two_instances_admit_no_more_together_than_one(start_store: Starts, settings: Settings) -> None:
    limits = {"tenant_sessions": 5, "tenant_prompts_per_minute": 1}
    await start_store(**limits)
    async with limited(start_store, settings, **limits) as api:
        model, ours = new_id("m"), tenant()
        await api.worker(model, capacity=60)
        made = await asyncio.gather(
            *(api.create(model, tenant=ours) for _ in range(20)), return_exceptions=True
        )
        records = [one for one in made if isinstance(one, SessionRecord)]
        assert len(records) == 5
        assert sum(isinstance(one, TenantLimitError) for one in made) == 15
        prompts = await asyncio.gather(
            *(api.prompt(records[n % 5].id, "x") for n in range(20)), return_exceptions=True
        )
        assert sum(isinstance(one, TenantLimitError) for one in prompts) == 19


async def test_events_have_no_metadata(start_store: Starts, settings: Settings) -> None:
    async with limited(start_store, settings) as api:
        model = new_id("m")
        worker = await api.worker(model)
        record = await api.create(model, metadata={"note": "x" * 500})
        assert record.metadata == {"note": "x" * 500}
        await api.place(record, worker)
        events = await api.until_events(record.id, "session.created", "session.placed")
        assert [event.record.metadata for event in events] == [{}, {}]  # type: ignore[union-attr]
        assert (await api.get(record.id)).metadata == record.metadata


@pytest.mark.real_servers
async def test_limits_outlast_a_kill(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"tenant_prompts_per_minute": 1, "tenant_creations_per_minute": 1}
    limited = settings.model_copy(update=limits)
    model, ours = new_id("m"), tenant()
    async with Harness.connected(settings) as api:
        async with Process.running(limited) as process:
            await api.worker(model)
            record = await api.create(model, tenant=ours)
            await api.prompt(record.id, "one")
            # A busy machine may take longer for the rest than the minute after which both are allowed again.
            now = time.time()
            monkeypatch.setattr(SystemClock, "wall", staticmethod(lambda: now))
            process.process.send_signal(signal.SIGKILL)
            await process.died()
        async with Store.running(limited):
            await refused(api.prompt(record.id, "two"), "tenant_prompts_per_minute")
            await refused(api.create(model, tenant=ours), "tenant_creations_per_minute")


# Rows, on both implementations


def ended(record: SessionRecord, now: float) -> Change:
    end = rules.end(record, "over", now)
    assert end is not None
    return end


async def new_session(
    database: Database, ours: str, prompt: str, metadata: dict[str, str], **controls: str
) -> SessionRecord:
    given = {"prompt": prompt, "metadata": metadata, "controls": controls}
    made = CreateSession.model_validate(
        {"id": new_id("ses"), "tenant": ours, "model": "m", "seed": 1} | given
    )
    change = rules.create(made, 1.0)
    async with database.transaction() as db:
        row = await db.tenants.lock(ours)
        await db.changes.create(change)
        more = created_bytes(prompt, metadata.items(), controls)
        await db.tenants.write(replace(row, stored_bytes=row.stored_bytes + more))
    return change.record


async def test_deleted_rows_give_their_tenants_bytes_back(database: Database) -> None:
    kept = await new_session(database, "ta", "Würfel", {})
    gone = await new_session(database, "ta", "x" * 30, {"é": "ü" * 10}, steer="ä")
    theirs = await new_session(database, "tb", "x" * 7, {})
    async with database.transaction() as db:
        for record in (gone, theirs):
            # The values at the end do not count.
            await db.changes.write(ended(record.model_copy(update={"controls": {}}), 2.0))
        await db.progress.mark_purged([gone.id, theirs.id], 3.0)
    async with database.transaction() as db:
        assert (await db.tenants.lock("ta")).stored_bytes == 2 * ROW_BYTES + 7 + 30 + 2 + 20 + 5 + 4
        assert await db.progress.delete_ended(10.0, 1) == 1
        assert await db.progress.delete_ended(10.0, 5) == 1
    async with database.transaction() as db:
        assert (await db.tenants.lock("ta")).stored_bytes == ROW_BYTES + 7
        assert (await db.tenants.lock("tb")).stored_bytes == 0
        assert await db.sessions.get(kept.id) is not None


async def test_a_tenant_that_stores_nothing_and_has_not_asked_lately_is_forgotten(database: Database) -> None:
    """If remembered for ever, it would cost the others the places that are kept for newcomers."""
    await new_session(database, "ta", "x", {})
    async with database.transaction() as db:
        for name, full_at in (("tb", 5.0), ("tc", 15.0)):
            await db.tenants.write(replace(await db.tenants.lock(name), creations_full_at=full_at))
        await db.tenants.write(replace(await db.tenants.lock("td"), prompts_full_at=15.0))
    async with database.transaction() as db:
        assert await db.tenants.delete_unused(10.0) == 1
        census = await db.admission.census("ses_x", "m", "tb", renewed_after=0.0, known_after=0.0)
        assert not census.use.known
        assert await db.tenants.delete_unused(20.0) == 2
    async with database.transaction() as db:
        census = await db.admission.census("ses_x", "m", "ta", renewed_after=0.0, known_after=0.0)
        assert (census.use.known, census.use.others) == (True, False)


async def test_a_tenants_row_is_locked_also_while_it_is_made(
    server: DatabaseServer, database: Database
) -> None:
    order: list[str] = []

    async def second() -> None:
        async with server.connect().transaction() as db:
            row = await db.tenants.lock("ta")
            order.append(f"second sees {row.stored_bytes}")

    async with database.transaction() as db:
        row = await db.tenants.lock("ta")
        assert row.stored_bytes == 0
        task = asyncio.create_task(second())
        await server.until_waiting()
        await db.tenants.write(replace(row, stored_bytes=5))
        async with server.connect().transaction() as other:
            await other.tenants.lock("tb")
        order.append("first")
    await task
    assert order == ["first", "second sees 5"]

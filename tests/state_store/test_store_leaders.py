"""Taking, keeping and leaving the lead, and refusals to former leaders. On Postgres and in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import text

from tests.helpers.waiting import eventually
from tests.state_store.state_store_harness import Harness, memory_servers
from turboserve import subjects
from turboserve.contracts.base import Contract
from turboserve.contracts.errors import ConflictError, StaleTermError
from turboserve.contracts.leading import (
    Campaign,
    CampaignResult,
    GetLeader,
    KeepLead,
    LeaderRecord,
    StepDown,
    pool_leader,
)
from turboserve.contracts.pool import PoolReport
from turboserve.contracts.requests import (
    DrainWorker,
    ListWorkers,
    NoteDecision,
    PlaceSession,
    ReleaseSession,
    SuspendIdle,
    WorkerGone,
)
from turboserve.contracts.sessions import Decision, Phase, SessionRecord
from turboserve.contracts.workers import WorkerPhase
from turboserve.ids import new_id
from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.ports.database import Database
from turboserve.state_store.settings import Settings
from turboserve.subject_types import Endpoint

SERVERS = ("real", "memory")


@pytest.fixture
async def database(settings: Settings, api: Harness) -> AsyncIterator[Database]:
    """The same database. Afterwards there is no leader and no term, for later tests."""
    memory = memory_servers(settings)
    if memory is not None:
        yield memory.database(settings)
        return
    database = PostgresDatabase(settings)
    yield database
    async with database.transaction() as db:
        await db.connection.execute(text("delete from leaders"))
    await database.close()


class Candidate:
    """One instance of a service."""

    def __init__(self, api: Harness, holder: str, service: str = "scheduler") -> None:
        self.api, self.holder, self.service = api, holder, service
        self.seen = LeaderRecord(name=service)

    async def look(self) -> LeaderRecord:
        self.seen = await self.api.bus.call(subjects.GET_LEADER, GetLeader(name=self.service))
        return self.seen

    async def campaign(self) -> CampaignResult:
        request = Campaign(name=self.service, holder=self.holder, term=self.seen.term, beat=self.seen.beat)
        result = await self.api.bus.call(subjects.CAMPAIGN, request)
        self.seen = result.record
        return result

    async def keep(self, term: int) -> LeaderRecord:
        request = KeepLead(name=self.service, holder=self.holder, term=term)
        return await self.api.bus.call(subjects.KEEP_LEAD, request)

    async def step_down(self, term: int) -> LeaderRecord:
        request = StepDown(name=self.service, holder=self.holder, term=term)
        return await self.api.bus.call(subjects.STEP_DOWN, request)


def place(record: SessionRecord, worker: str, term: int) -> PlaceSession:
    decision = Decision(session=record.id, epoch=record.epoch, kind="place", reason="told to")
    return PlaceSession(
        session=record.id, expected_version=record.version, worker=worker, decision=decision, term=term
    )


async def test_of_many_candidates_one_leads(api: Harness, database: Database) -> None:
    candidates = [Candidate(api, f"c{number}") for number in range(8)]
    results = await asyncio.gather(*(candidate.campaign() for candidate in candidates))
    [winner] = [result.record for result in results if result.granted]
    assert winner.term == 1
    assert await candidates[0].look() == winner


async def test_a_leader_that_renews_is_not_replaced_and_a_silent_one_is(
    api: Harness, database: Database
) -> None:
    first, second = Candidate(api, "first"), Candidate(api, "second")
    assert (await first.campaign()).granted
    await second.look()
    await first.keep(1)
    assert not (await second.campaign()).granted
    taken = await second.campaign()
    assert taken.granted
    assert (taken.record.holder, taken.record.term) == ("second", 2)
    for call in (first.keep, first.step_down):
        with pytest.raises(StaleTermError) as caught:
            await call(1)
        assert (caught.value.field, caught.value.limit) == ("term", 2)
    with pytest.raises(StaleTermError):
        await first.keep(2)


async def test_who_steps_down_is_followed_at_once(api: Harness, database: Database) -> None:
    first, second = Candidate(api, "first"), Candidate(api, "second")
    await first.campaign()
    await second.look()
    await first.step_down(1)
    taken = await second.campaign()
    assert taken.granted
    assert (taken.record.holder, taken.record.term) == ("second", 2)


async def test_a_command_of_an_old_term_is_refused_whatever_it_is(api: Harness, database: Database) -> None:
    worker, spare = await api.worker("terms"), await api.worker("terms")
    waiting, running = await api.create("terms"), await api.place(await api.create("terms"), worker)
    old, new = Candidate(api, "old"), Candidate(api, "new")
    await old.campaign()
    await new.look()
    await new.campaign()
    decision = Decision(session=waiting.id, epoch=0, kind="wait", reason="no room")
    idle = SuspendIdle(session=running.id, expected_version=running.version, term=1)
    requests: tuple[tuple[Endpoint[Any, Any], Contract], ...] = (
        (subjects.PLACE_SESSION, place(waiting, worker, term=1)),
        (subjects.PLACE_SESSION, place(waiting, worker, term=0)),
        (subjects.NOTE_DECISION, NoteDecision(decision=decision, term=1)),
        (subjects.SUSPEND_IDLE, idle),
        (
            subjects.RELEASE_SESSION,
            ReleaseSession(session=running.id, expected_version=2, decision=decision, term=1),
        ),
        (subjects.WORKER_GONE, WorkerGone(worker=spare, reason="silent", term=1)),
    )
    for endpoint, request in requests:
        with pytest.raises(StaleTermError):
            await api.bus.call(endpoint, request)
    assert (await api.get(waiting.id)).version == waiting.version
    assert (await api.get(running.id)).phase is Phase.ACTIVE
    assert (await api.bus.call(subjects.PLACE_SESSION, place(waiting, worker, term=2))).worker == worker
    # The only autoscaler of a pool does not lead, and need not.
    await api.bus.call(subjects.WORKER_GONE, WorkerGone(worker=spare, reason="released"))


async def test_orders_of_an_old_leader_of_a_pool_change_no_worker(api: Harness, database: Database) -> None:
    pool, worker = new_id("p"), await api.worker("terms")
    old, new = (Candidate(api, name, pool_leader(pool)) for name in ("old", "new"))
    await old.campaign()
    report = PoolReport(pool=pool, model="terms", maximum=3, pool_term=1)
    assert (await api.bus.call(subjects.REPORT_POOL, report)).pool == pool
    await new.look()
    await new.campaign()
    requests: tuple[tuple[Endpoint[Any, Any], Contract], ...] = (
        (subjects.REPORT_POOL, report.model_copy(update={"maximum": 9})),
        (subjects.DRAIN_WORKER, DrainWorker(worker=worker, pool=pool, pool_term=1)),
        (subjects.WORKER_GONE, WorkerGone(worker=worker, reason="no such process", pool=pool, pool_term=1)),
    )
    for endpoint, request in requests:
        with pytest.raises(StaleTermError) as caught:
            await api.bus.call(endpoint, request)
        assert (caught.value.field, caught.value.limit) == ("term", 2)
    row = {row.id: row for row in (await api.bus.call(subjects.LIST_WORKERS, ListWorkers())).workers}[worker]
    assert row.phase is WorkerPhase.READY
    # Terms of another pool, and of the scheduler, are others.
    await api.bus.call(subjects.REPORT_POOL, report.model_copy(update={"pool": new_id("p"), "pool_term": 0}))
    await api.bus.call(subjects.DRAIN_WORKER, DrainWorker(worker=worker, pool=pool, pool_term=2))


async def is_waiting(settings: Settings, database: Database) -> bool:
    """Return whether a transaction of this database waits for a row that another has locked."""
    memory = memory_servers(settings)
    if memory is not None:
        return memory.postgres.locks.waiting > 0
    assert isinstance(database, PostgresDatabase)
    waiting = "datname = current_database() and wait_event_type = 'Lock' and wait_event <> 'advisory'"
    async with database.engine.connect() as connection:
        found = await connection.execute(text(f"select count(*) from pg_stat_activity where {waiting}"))
        return bool(found.scalar_one())


async def test_a_new_term_waits_for_the_commands_of_the_old_one(
    api: Harness, database: Database, settings: Settings
) -> None:
    """Renewals do not wait: a leader must not lose its lease because its own commands are slow."""
    first, second = Candidate(api, "first"), Candidate(api, "second")
    await first.campaign()
    async with database.transaction() as db:
        assert (await db.leaders.share("scheduler")).term == 1
        await first.keep(1)
        await second.look()
        taking = asyncio.create_task(second.campaign())
        await eventually(lambda: is_waiting(settings, database))
        assert not taking.done()
    assert (await taking).granted


async def test_leads_of_two_services_are_two(api: Harness, database: Database) -> None:
    assert (await Candidate(api, "a", "scheduler").campaign()).granted
    assert (await Candidate(api, "b", "another").campaign()).granted
    with pytest.raises(ConflictError):
        await Candidate(api, "a", "another").keep(1)

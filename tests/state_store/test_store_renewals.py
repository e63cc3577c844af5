"""Renewals that share a transaction are answered as if each were alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from sqlalchemy import text

from tests.helpers.waiting import eventually
from tests.state_store.conftest import StartStore
from tests.state_store.state_store_harness import LIMIT_S, Harness, memory_servers
from turboserve import subjects
from turboserve.contracts.control_declarations import ControlDeclaration
from turboserve.contracts.errors import InvalidInputError, UnavailableError, WorkerGoneError
from turboserve.contracts.requests import ListWorkers
from turboserve.contracts.workers import HeldSession, Renewal, WorkerRecord
from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.ports.database import Database, StatementError, unavailable
from turboserve.state_store.repository import sessions as repository
from turboserve.state_store.service import renewals, transactions
from turboserve.state_store.service.renewals import Renewals
from turboserve.state_store.settings import Settings

SERVERS = ("real", "memory")
MODEL = "together"


class Gate:
    """Lets renewals gather until a test has sent all of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._instance: Renewals | None = None
        self.batches: list[list[str]] = []
        """Workers of each transaction that several share."""
        self.failure: Exception | None = None
        """What such a transaction raises."""
        self._schedule = Renewals._schedule
        share = Renewals._share_transaction

        async def shared(instance: Renewals, batch: dict[str, Any]) -> Any:
            self.batches.append(sorted(batch))
            if self.failure is not None:
                raise self.failure
            return await share(instance, batch)

        monkeypatch.setattr(Renewals, "_share_transaction", shared)
        monkeypatch.setattr(renewals, "GATHER_S", 0.0)

    def close(self) -> None:
        """Let the next renewal pass, and those after it wait."""

        def keep(instance: Renewals) -> None:
            self._instance = instance

        self._patch.setattr(renewals, "GATHER_S", 3_600.0)
        self._patch.setattr(Renewals, "_schedule", keep)

    @staticmethod
    def _requests(instance: Renewals) -> int:
        return sum(len(queued.requests) for queued in instance._queue._waiting.values())

    async def open(self, waiting: int) -> None:
        """Let renewals pass once so many wait."""

        async def all_wait() -> bool:
            return self._instance is not None and self._requests(self._instance) == waiting

        await eventually(all_wait)
        self._patch.setattr(renewals, "GATHER_S", 0.0)
        self._patch.setattr(Renewals, "_schedule", self._schedule)
        assert self._instance is not None
        self._instance._next_at = 0.0
        self._instance._schedule()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
async def database(settings: Settings) -> AsyncIterator[Database]:
    """The state store's database, as another instance has it."""
    memory = memory_servers(settings)
    database = PostgresDatabase(settings) if memory is None else memory.database(settings)
    yield database
    await database.close()


Renew = Callable[[], Awaitable[Renewal]]


async def at_once(gate: Gate, api: Harness, *requests: Renew) -> list[asyncio.Task[Renewal]]:
    """Send renewals that share a transaction. Returns their tasks."""
    gate.close()
    await api.worker(MODEL)
    tasks = [asyncio.ensure_future(request()) for request in requests]
    await gate.open(len(tasks))
    return tasks


async def rows(api: Harness) -> dict[str, WorkerRecord]:
    page = await api.bus.call(subjects.LIST_WORKERS, ListWorkers(include_gone=True))
    return {record.id: record for record in page.workers}


async def test_each_gets_its_own_sessions_and_its_own_lease(gate: Gate, api: Harness) -> None:
    workers = [await api.worker(MODEL) for _ in range(4)]
    placed = [await api.place(await api.create(MODEL), worker) for worker in workers for _ in range(2)]
    paused = await api.pause(placed[0].id)
    moving = await api.begin_migration(placed[2], workers[2])
    held = (HeldSession(session=paused.id, epoch=1, next_chunk=0, resident=False),)
    before = await rows(api)
    tasks = await at_once(
        gate,
        api,
        partial(api.renew, workers[0], MODEL, held=held),
        # Holding what another worker owns lists it for none.
        partial(api.renew, workers[1], MODEL, held=held),
        partial(api.renew, workers[2], MODEL),
        partial(api.renew, workers[3], MODEL, capacity=9),
    )
    answers = await asyncio.gather(*tasks)
    assert gate.batches == [sorted(workers)]
    assert [answer.worker for answer in answers] == workers
    assert [[row.id for row in answer.assigned] for answer in answers] == [
        [row.id for row in placed[first : first + 2]] for first in (0, 2, 4, 6)
    ]
    assert [[one.record.id for one in answer.incoming] for answer in answers] == [[], [], [moving.id], []]
    assert [[key.session for key in answer.keys] for answer in answers] == [[], [moving.id], [moving.id], []]
    after = await rows(api)
    for worker in workers:
        assert after[worker].renewed_at > before[worker].renewed_at
    unchanged = {worker: before[worker].model_copy(update={"renewed_at": 0.0}) for worker in workers[:3]}
    assert unchanged == {w: after[w].model_copy(update={"renewed_at": 0.0}) for w in workers[:3]}
    assert after[workers[3]].capacity == 9


async def test_the_refusal_of_one_does_not_concern_the_others(gate: Gate, api: Harness) -> None:
    gone, wrong, late, fine = [await api.worker(MODEL, started_at=20.0) for _ in range(4)]
    new = f"{fine}_new"
    await api.gone(gone)
    unknown = ControlDeclaration(name="steer", description="", value_schema={"nonsense": 1})
    tasks = await at_once(
        gate,
        api,
        partial(api.renew, gone, MODEL),
        partial(api.renew, wrong, MODEL, started_at=20.0, controls=(unknown,)),
        partial(api.renew, late, MODEL, started_at=10.0),
        partial(api.renew, fine, MODEL, started_at=20.0),
        partial(api.renew, new, MODEL),
    )
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert gate.batches == [sorted([gone, wrong, late, fine, new])]
    assert [type(one) for one in found] == [
        WorkerGoneError,
        InvalidInputError,
        WorkerGoneError,
        Renewal,
        Renewal,
    ]
    assert new in await rows(api)


async def test_a_locked_row_delays_its_own_worker_alone(gate: Gate, api: Harness, database: Database) -> None:
    locked, free, other = [await api.worker(MODEL) for _ in range(3)]
    async with database.transaction() as db:
        await db.workers.get(locked, lock=True)
        tasks = await at_once(gate, api, *(partial(api.renew, w, MODEL) for w in (locked, free, other)))
        await asyncio.gather(*tasks[1:])
        assert not tasks[0].done()
    assert (await tasks[0]).worker == locked
    assert len(gate.batches) == 1


async def test_if_what_they_share_fails_each_is_renewed_alone(gate: Gate, api: Harness) -> None:
    workers = [await api.worker(MODEL) for _ in range(3)]
    before = await rows(api)
    gate.failure = StatementError("one of the rows cannot be stored")
    tasks = await at_once(gate, api, *(partial(api.renew, w, MODEL) for w in workers))
    assert [answer.worker for answer in await asyncio.gather(*tasks)] == workers
    after = await rows(api)
    assert all(after[worker].renewed_at > before[worker].renewed_at for worker in workers)


@pytest.mark.real_servers
@pytest.mark.parametrize("state", ["53100", "57014", "XX001"])
async def test_a_row_that_postgres_refuses_for_now_concerns_no_other(
    gate: Gate, api: Harness, database: Database, state: str
) -> None:
    assert isinstance(database, PostgresDatabase)
    refused, *fine = [await api.worker(MODEL) for _ in range(4)]
    name = f"refuse_{state.lower()}"
    statements = (
        f"create function {name}() returns trigger language plpgsql as "
        f"$$ begin raise exception 'refused' using errcode = '{state}'; end $$",
        f"create trigger {name} before update on workers for each row "
        f"when (new.id = '{refused}') execute function {name}()",
    )
    async with database.transaction() as db:
        for statement in statements:
            await db.connection.execute(text(statement))
    try:
        tasks = await at_once(gate, api, *(partial(api.renew, w, MODEL) for w in (refused, *fine)))
        found = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        async with database.transaction() as db:
            await db.connection.execute(text(f"drop function {name} cascade"))
    assert gate.batches == [sorted([refused, *fine])]
    assert [type(one) for one in found] == [UnavailableError, *[Renewal] * 3]


@pytest.mark.real_servers
async def test_rows_are_parsed_when_they_are_no_longer_locked(
    gate: Gate, api: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [await api.running(MODEL) for _ in range(2)]
    workers = [str(record.worker) for record in records]
    before = await rows(api)
    parse = repository.record_of

    def fails(row: Any) -> Any:
        if row["id"] == records[0].id:
            raise ValueError("it cannot be parsed")
        return parse(row)

    monkeypatch.setattr(repository, "record_of", fails)
    tasks = await at_once(gate, api, *(partial(api.renew, w, MODEL) for w in workers))
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(found[1], Renewal)
    assert not isinstance(found[0], Renewal)
    after = await rows(api)
    assert all(after[worker].renewed_at > before[worker].renewed_at for worker in workers)


async def test_while_the_database_is_away_each_is_told_so(gate: Gate, api: Harness) -> None:
    workers = [await api.worker(MODEL) for _ in range(3)]
    gate.failure = unavailable()
    tasks = await at_once(gate, api, *(partial(api.renew, w, MODEL) for w in workers))
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in found] == [UnavailableError] * 3


async def test_one_worker_that_asks_twice_gets_two_answers(gate: Gate, api: Harness) -> None:
    record = await api.running(MODEL)
    worker = str(record.worker)
    tasks = await at_once(gate, api, *(partial(api.renew, worker, MODEL) for _ in range(2)))
    for answer in await asyncio.gather(*tasks):
        assert [row.id for row in answer.assigned] == [record.id]


async def test_one_that_waits_for_its_fence_gets_it_with_the_answer(
    gate: Gate,
    start_store: StartStore,
    settings: Settings,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transactions, "FENCE_TIMEOUT_S", LIMIT_S)
    await start_store(sweep_s=3_600.0)
    async with Harness.connected(settings) as api:
        record, other = await api.running(MODEL), await api.running(MODEL)
        async with database.transaction() as db:
            assert await db.fence.reopen(record.id, record.epoch, record.own_revision or 0)
        names = [str(record.worker), str(other.worker)]
        tasks = await at_once(gate, api, *(partial(api.renew, w, MODEL) for w in names))
        [mine], [theirs] = [answer.assigned for answer in await asyncio.gather(*tasks)]
        assert gate.batches == [sorted(names)]
        assert (mine.own_revision or 0) > (record.own_revision or 0)
        assert theirs.own_revision == other.own_revision


async def test_a_renewal_that_no_other_precedes_waits_for_none(
    gate: Gate, api: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewals, "GATHER_S", 3_600.0)
    await api.worker(MODEL)
    assert gate.batches == []

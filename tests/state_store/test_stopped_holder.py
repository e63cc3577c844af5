"""A state store that is stopped while it counts, and continues after another one took over, counts nothing.

The lock decides who counts. What keeps a former holder from counting twice is in its transactions.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from tests.helpers.chunk_headers import chunk_header
from tests.helpers.waiting import eventually
from tests.state_store.core_requests import REQUEST
from tests.state_store.database_servers import DatabaseServer
from tests.state_store.state_store_harness import Harness, Process
from turboserve import subjects
from turboserve.bus.log import Entry
from turboserve.bus.owners import Owners
from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.errors import UnavailableError
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.usage import ListUsage
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.ids import new_id
from turboserve.state_store.accounting import CURSOR, Accounting, AlreadyCountedError
from turboserve.state_store.core import sessions as rules
from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.periodic_writes import WorkerChunks
from turboserve.state_store.ports.database import Database, UnitOfWork
from turboserve.state_store.ports.pool_history import HistoryTable
from turboserve.state_store.service.pools import Pools
from turboserve.state_store.settings import Settings

WALL = 1_700_000_000.0
WORKER = "wk_1"


class HandSetClock:
    """A process's clock. `offset_s` is what its monotonic clock is ahead."""

    def __init__(self, offset_s: float) -> None:
        self.now_s, self._offset_s = 0.0, offset_s

    def monotonic(self) -> float:
        return self.now_s + self._offset_s

    def wall(self) -> float:
        return WALL + self.now_s


class Stopped:
    """A database whose process stops before its next transaction begins, until it `continues`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.reached, self.continues = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def transaction(self, *, durable: bool = True) -> AsyncIterator[UnitOfWork]:
        self.reached.set()
        await self.continues.wait()
        async with self._database.transaction(durable=durable) as db:
            yield db


def pools_of(database: Any, clock: Any) -> Pools:
    return Pools(database, clock, Settings())


async def renewed(database: Database, at_s: float) -> None:
    """Write the row of a worker that no pool reports, as of its renewal `at_s` after the beginning."""
    record = WorkerRecord(
        id=WORKER,
        model="m",
        phase=WorkerPhase.READY,
        capacity=1,
        device="cuda:0",
        started_at=WALL,
        renewed_at=WALL + at_s,
    )
    async with database.transaction() as db:
        if not await db.workers.insert(record):
            await db.workers.write(record)


async def paid_s(database: Database) -> float:
    async with database.transaction() as db:
        [(row, _)] = await db.rentals.beside_workers()
    assert row is not None
    return row.paid_s


async def test_cost_of_a_former_holders_clock_is_counted_once(
    server: DatabaseServer, database: Database
) -> None:
    """It is stopped for 20 s between its decision to look and its transaction, and then looks twice."""
    mine, others = HandSetClock(500.0), HandSetClock(9_000.0)
    stopped = Stopped(server.connect())
    holder, successor = pools_of(stopped, mine), pools_of(database, others)
    look = asyncio.create_task(holder.accrue())
    await stopped.reached.wait()
    for at_s in range(0, 21, 2):
        others.now_s = float(at_s)
        await renewed(database, at_s)
        await successor.accrue()
    assert await paid_s(database) == pytest.approx(20.0)
    # The worker has renewed since the successor's last look.
    mine.now_s = 20.5
    await renewed(database, 20.5)
    stopped.continues.set()
    await look
    assert await paid_s(database) == pytest.approx(20.5)
    mine.now_s = 21.0
    await renewed(database, 21.0)
    await holder.accrue()
    assert await paid_s(database) == pytest.approx(21.0)
    others.now_s = 22.0
    await renewed(database, 22.0)
    await successor.accrue()
    assert await paid_s(database) == pytest.approx(22.0)


class OneOwner:
    """Every chunk is of an owner."""

    async def header(self, session: str, entry: Entry) -> ChunkHeader:
        return ChunkHeader.from_headers(entry.headers)


def counting(database: Database, clock: Any) -> tuple[Accounting, WorkerChunks]:
    history = WorkerChunks(database, clock, enabled=True)
    owners: Owners = OneOwner()  # type: ignore[assignment]
    playheads: Any = SimpleNamespace(known=lambda session: None)
    bus: Any = None
    return Accounting(database, bus, owners, playheads, clock, 0.05, lambda: None, history), history


def entries(session: str, first: int, last: int) -> list[Entry]:
    found = []
    for index in range(first, last + 1):
        header = chunk_header(session, index, 1, WORKER)
        subject = subjects.CHUNK.by(session, WORKER)
        found.append(Entry(subject, index + 1, b"", header.to_headers()))
    return found


async def counted(database: Database, session: str) -> tuple[int, int, int]:
    """Return the position, the row's next chunk, and the chunks in the usage."""
    async with database.transaction() as db:
        row = await db.sessions.get(session)
        page = await db.rentals.usage(ListUsage(from_day=0, to_day=30_000))
        position = await db.progress.position(CURSOR)
    assert row is not None
    return position, row.next_chunk, sum(day.chunks for day in page.days)


async def test_a_former_holder_counts_no_chunk_that_another_has_counted(
    server: DatabaseServer, database: Database
) -> None:
    clock = HandSetClock(0.0)
    holder, unwritten = counting(server.connect(), clock)
    successor, _ = counting(database, clock)
    created = rules.create(REQUEST, 1.0)
    session = created.record.id
    async with database.transaction() as db:
        await db.progress.position(CURSOR)
        await db.changes.create(created)
    # Both have read the log from the same position when the holder is stopped.
    await successor.count(entries(session, 0, 9), 0)
    after = await counted(database, session)
    assert after == (10, 10, 10)
    for batch in (entries(session, 0, 4), entries(session, 0, 9), entries(session, 0, 12)):
        with pytest.raises(AlreadyCountedError):
            await holder.count(batch, 0)
    await unwritten.flush()
    assert await counted(database, session) == after
    async with database.transaction() as db:
        assert await db.pool_history.oldest(HistoryTable.CHUNKS) is None
        # Other tests count with this cursor.
        assert await db.progress.move(CURSOR, 10, 0)


async def test_locks_of_a_process_that_is_stopped_between_two_steps_of_a_statement_are_released(
    settings: Settings,
) -> None:
    """Incident: a state store that got SIGSTOP while it counted kept the next one from counting.

    The driver prepares a statement that is new to its connection in a first message, and executes it in a
    second one. Between them, Postgres waits for the second one, and none of its limits on silence holds.
    """
    cursor, session_key, exclusive_key = new_id("cur"), 71, 72
    held, continues = threading.Event(), threading.Event()

    async def first_step(connection: AsyncConnection) -> None:
        driver = (await connection.get_raw_connection()).driver_connection
        assert driver is not None
        await driver.prepare("select 'a statement that is new to the connection'")

    async def hold() -> None:
        database = PostgresDatabase(settings.model_copy(update={"transaction_deadline_s": 2.0}))
        while not held.is_set():
            # A busy machine may take longer than the deadline, and the process then begins again.
            with suppress(UnavailableError):
                async with (
                    database.session_lock(session_key, 60.0) as lock,
                    database.exclusive(exclusive_key) as unit,
                    database.transaction() as db,
                ):
                    if not await lock.acquire():
                        # The server has not yet ended the connection before this one.
                        continue
                    assert await db.progress.move(cursor, 0, 1)
                    for connection in (lock._connection, unit.connection, db.connection):
                        await first_step(connection)
                    held.set()
                    # This blocks the thread's event loop, as SIGSTOP does.
                    continues.wait()
        await database.close()

    async with AsyncExitStack() as stack:
        successor = PostgresDatabase(settings)
        stack.push_async_callback(successor.close)
        async with successor.transaction() as db:
            assert await db.progress.position(cursor) == 0
        holder = asyncio.create_task(asyncio.to_thread(asyncio.run, hold()))
        try:
            await eventually(held.is_set)
            async with successor.transaction() as db:
                assert await db.progress.move(cursor, 0, 2)
            async with successor.exclusive(exclusive_key):
                pass
            async with successor.session_lock(session_key, 60.0) as lock:
                await eventually(lock.acquire)
        finally:
            continues.set()
            await holder


async def test_sigstop_of_each_store_in_turn_counts_every_chunk_once(settings: Settings) -> None:
    """Real processes: the one that counts is stopped for longer than its lock lasts, and then continues."""
    short = settings.model_copy(
        update={"store_lead_timeout_s": 2.0, "transaction_deadline_s": 2.0, "request_deadline_s": 5.0}
    )
    database = PostgresDatabase(settings)
    tenant, model = new_id("t"), new_id("m")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(database.close)
        processes = [await stack.enter_async_context(Process.running(short)) for _ in range(2)]
        api = await stack.enter_async_context(Harness.connected(settings))
        made: list[SessionRecord] = []

        async def placed() -> bool:
            """Try until a busy machine has time for each step within the short deadlines."""
            with suppress(UnavailableError):
                worker = await api.worker(model)
                made.append(await api.place(await api.create(model, tenant=tenant), worker))
            return bool(made)

        await eventually(placed)
        [record] = made
        sent = 0

        async def send(count: int) -> None:
            nonlocal sent
            for _ in range(count):
                await api.chunk(record, sent)
                sent += 1

        # A stopped process does not answer its share of the requests, so the tests read the rows.
        async def all_counted() -> bool:
            async with database.statement() as db:
                row = await db.sessions.get(record.id)
            return row is not None and row.next_chunk == sent

        for process in processes:
            await send(5)
            os.kill(process.process.pid, signal.SIGSTOP)
            try:
                await send(5)
                await eventually(all_counted)
            finally:
                os.kill(process.process.pid, signal.SIGCONT)
            await send(5)
            await eventually(all_counted)
        async with database.statement() as db:
            page = await db.rentals.usage(ListUsage(tenant=tenant, from_day=0, to_day=30_000))
        assert sum(day.chunks for day in page.days) == sent == 30

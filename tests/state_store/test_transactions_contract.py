"""Transactions, locks and deadlines: the same in Postgres and in the database in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import pytest

from tests.helpers.waiting import eventually
from tests.state_store.core_requests import REQUEST
from tests.state_store.database_servers import DatabaseServer
from turboserve.contracts.errors import ConflictError, UnavailableError
from turboserve.contracts.leading import LeaderRecord
from turboserve.contracts.sessions import Activity, Decision, Phase, PromptReceipt
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.state_store.core import sessions as rules
from turboserve.state_store.core import workers as worker_rules
from turboserve.state_store.core.aging import Aging
from turboserve.state_store.core.change import Change
from turboserve.state_store.leader import lead
from turboserve.state_store.ports.database import Database, UnitOfWork
from turboserve.state_store.ports.records import LockedPlacement
from turboserve.state_store.settings import Settings
from turboserve.tasks import stop

KEY = 7
SHORT_S = 1.0
"""A deadline that tests wait for."""


def worker(name: str = "wk_1", **fields: object) -> WorkerRecord:
    values = {"id": name, "model": "m", "phase": WorkerPhase.READY, "capacity": 1}
    return WorkerRecord.model_validate({**values, "started_at": 1.0, "renewed_at": 1.0, **fields})


async def unless_late(work: Callable[[], Awaitable[None]], begun: asyncio.Event) -> None:
    """Run `work`; repeat it if a busy machine exceeds a deadline before `begun` is set."""
    while True:
        try:
            return await work()
        except UnavailableError:
            if begun.is_set():
                raise


async def write_clock(db: UnitOfWork, name: str, wall: float) -> None:
    await db.clocks.put(name, Aging(wall, wall))


async def capacity(database: Database, name: str = "wk_1") -> int | None:
    async with database.statement() as db:
        found = await db.workers.get(name)
        return None if found is None else found.capacity


async def test_what_is_not_committed_is_seen_by_its_own_transaction_alone(
    server: DatabaseServer, database: Database
) -> None:
    other = server.connect()
    async with database.transaction() as db:
        assert await db.workers.insert(worker())
        assert await db.workers.get("wk_1") is not None
        assert await capacity(other) is None
    assert await capacity(other) == 1


async def test_each_statement_sees_what_was_committed_before_it(
    server: DatabaseServer, database: Database
) -> None:
    other = server.connect()
    async with database.transaction() as db:
        assert await db.workers.get("wk_1") is None
        async with other.transaction() as elsewhere:
            await elsewhere.workers.insert(worker())
        assert await db.workers.get("wk_1") is not None


async def test_an_exception_takes_everything_back(database: Database) -> None:
    with suppress(ZeroDivisionError):
        async with database.transaction() as db:
            await db.workers.insert(worker())
            await db.changes.create(rules.create(REQUEST, 1.0))
            raise ZeroDivisionError
    assert await capacity(database) is None
    async with database.statement() as db:
        assert await db.outbox.backlog() == (0, None)


async def test_a_cancelled_transaction_is_taken_back_and_holds_no_lock(
    server: DatabaseServer, database: Database
) -> None:
    locked = asyncio.Event()

    async def hold() -> None:
        async with database.transaction() as db:
            await db.workers.insert(worker())
            locked.set()
            await asyncio.sleep(60.0)

    task = asyncio.create_task(hold())
    await locked.wait()
    await stop(task)
    async with server.connect().transaction() as db:
        assert await db.workers.insert(worker(capacity=2))
    assert await capacity(database) == 2


async def test_a_locked_row_is_waited_for_and_read_as_it_is_then(
    server: DatabaseServer, database: Database
) -> None:
    other = server.connect()
    async with database.transaction() as db:
        await db.workers.insert(worker())

    async def second() -> int:
        async with other.transaction() as db:
            found = await db.workers.get("wk_1", lock=True)
            assert found is not None
            await db.workers.write(found.model_copy(update={"capacity": found.capacity + 1}))
            return found.capacity

    async with database.transaction() as db:
        found = await db.workers.get("wk_1", lock=True)
        assert found is not None
        task = asyncio.create_task(second())
        await server.until_waiting()
        # A transaction that only reads does not wait.
        assert await capacity(server.connect()) == 1
        await db.workers.write(found.model_copy(update={"capacity": 5}))
    assert await task == 5
    assert await capacity(database) == 6


async def test_a_plain_update_waits_for_a_lock_too(server: DatabaseServer, database: Database) -> None:
    change = rules.create(REQUEST, 1.0)
    async with database.transaction() as db:
        await db.changes.create(change)

    async def second() -> object:
        async with server.connect().statement() as db:
            return await db.fence.store("s1", 0, 9)

    async with database.transaction() as db:
        row = await db.sessions.get_row("s1", lock=True)
        assert row is not None
        task = asyncio.create_task(second())
        await server.until_waiting()
        after = row.record.model_copy(update={"epoch": 1, "version": 2})
        await db.changes.write(Change(after, ()))
    # Its condition is checked again once it has the lock.
    assert await task is None


async def test_rows_that_do_not_match_are_not_waited_for(server: DatabaseServer, database: Database) -> None:
    async with database.transaction() as db:
        await db.changes.create(rules.create(REQUEST, 1.0))
    async with database.transaction() as db:
        await db.sessions.get_row("s1", lock=True)
        async with server.connect().statement() as other:
            assert await other.fence.store("s1", 8, 9) is None


async def test_free_rows_are_locked_without_waiting_for_the_others(
    server: DatabaseServer, database: Database
) -> None:
    async with database.transaction() as db:
        for name in ("wk_1", "wk_2"):
            await db.workers.insert(worker(name))

    async def second() -> int:
        async with server.connect().transaction() as db:
            found = await db.workers.get("wk_2", lock=True)
            assert found is not None
            return found.capacity

    async with database.transaction() as db:
        await db.workers.get("wk_1", lock=True)
        async with server.connect().transaction() as other:
            assert list(await other.workers.lock_free(["wk_1", "wk_2", "wk_3"])) == ["wk_2"]
            task = asyncio.create_task(second())
            await server.until_waiting()
            await other.workers.write(worker("wk_2", capacity=4))
    assert await task == 4


async def test_waiters_get_a_lock_one_after_the_other(server: DatabaseServer, database: Database) -> None:
    async with database.transaction() as db:
        await db.workers.insert(worker(capacity=0 + 1))

    async def add() -> None:
        async with server.connect().transaction() as db:
            found = await db.workers.get("wk_1", lock=True)
            assert found is not None
            await asyncio.sleep(0)
            await db.workers.write(found.model_copy(update={"capacity": found.capacity + 1}))

    await asyncio.gather(*(add() for _ in range(8)))
    assert await capacity(database) == 9


async def test_who_inserts_the_same_waits_for_the_first_and_finds_it(
    server: DatabaseServer, database: Database
) -> None:
    async def second() -> bool:
        async with server.connect().transaction() as db:
            return await db.workers.insert(worker(capacity=2))

    async with database.transaction() as db:
        await db.workers.insert(worker())
        task = asyncio.create_task(second())
        await server.until_waiting()
    assert await task is False
    assert await capacity(database) == 1


async def test_who_inserts_the_same_goes_on_if_the_first_is_taken_back(
    server: DatabaseServer, database: Database
) -> None:
    async def second() -> bool:
        async with server.connect().transaction() as db:
            return await db.workers.insert(worker(capacity=2))

    with suppress(ZeroDivisionError):
        async with database.transaction() as db:
            await db.workers.insert(worker())
            task = asyncio.create_task(second())
            await server.until_waiting()
            raise ZeroDivisionError
    assert await task is True
    assert await capacity(database) == 2


async def test_what_has_to_be_unique_conflicts(server: DatabaseServer, database: Database) -> None:
    change = rules.create(REQUEST, 1.0)
    event = worker_rules.joined_event(worker(), 1.0)
    receipt = PromptReceipt(session="s1", prompt_id="e1", control_seq=1, prompt="p", accepted_at=1.0)
    async with database.transaction() as db:
        await db.changes.create(change)
        await db.outbox.add([event])
        await db.controls.insert(receipt)
    with pytest.raises(ConflictError):
        async with database.transaction() as db:
            await db.changes.create(change)
    with pytest.raises(ConflictError):
        async with database.transaction() as db:
            await db.outbox.add([event])
    for again in ({"prompt_id": "e1", "control_seq": 2}, {"prompt_id": "e2", "control_seq": 1}):
        with pytest.raises(ConflictError):
            async with database.transaction() as db:
                await db.controls.insert(receipt.model_copy(update=again))
    decision = Decision(session="s1", epoch=0, kind="place", reason="r")
    async with database.transaction() as db:
        await db.changes.write(Change(change.record, (), decision))
    with pytest.raises(ConflictError):
        async with database.transaction() as db:
            await db.changes.write(Change(change.record, (), decision))
    with pytest.raises(ConflictError):
        async with database.transaction() as db:
            await db.controls.note(decision.model_copy(update={"session": "nobody"}))


async def test_after_a_conflict_a_transaction_can_only_be_taken_back(database: Database) -> None:
    async with database.transaction() as db:
        await db.outbox.add([worker_rules.joined_event(worker(), 1.0)])

    async def go_on_after_it() -> None:
        async with database.transaction() as db:
            await db.workers.insert(worker())
            # Inside its block, a conflict has the driver's class.
            with suppress(Exception):
                await db.outbox.add([worker_rules.joined_event(worker(), 1.0)])
            await db.workers.get("wk_1")

    with pytest.raises(UnavailableError):
        await go_on_after_it()
    assert await capacity(database) is None


async def test_events_of_one_change_are_written_in_their_order(database: Database) -> None:
    [event] = rules.create(REQUEST, 1.0).events
    events = tuple(event.model_copy(update={"id": f"ev_{number}"}) for number in (3, 1, 2))
    async with database.transaction() as db:
        await db.changes.create(Change(event.record, events))
    later = tuple(event.model_copy(update={"id": f"ev_{number}"}) for number in (9, 5))
    decision = Decision(session="s1", epoch=0, kind="place", reason="r")
    async with database.transaction() as db:
        await db.sessions.get_row("s1", lock=True)
        await db.changes.write(
            Change(event.record.model_copy(update={"version": 2}), later, decision), migration_key=None
        )
    async with database.statement() as db:
        pending = await db.outbox.oldest(9)
        assert [one.event_id for one in pending] == ["ev_3", "ev_1", "ev_2", "ev_9", "ev_5"]
        assert [one.number for one in pending] == sorted(one.number for one in pending)
        assert len(await db.controls.decisions_of("s1", 9)) == 1
        found = await db.sessions.get("s1")
        assert found is not None
        assert found.version == 2
    async with database.transaction() as db:
        await db.changes.write(Change(event.record.model_copy(update={"version": 3})))
    async with database.statement() as db:
        found = await db.sessions.get("s1")
        assert found is not None
        assert (found.version, (await db.outbox.backlog())[0]) == (3, 5)


async def test_a_renewal_passes_a_shared_row_and_a_new_term_waits(
    server: DatabaseServer, database: Database
) -> None:
    record = LeaderRecord(name="scheduler", holder="h", term=1, beat=1)
    async with database.transaction() as db:
        await db.leaders.lock("scheduler", new_term=True)
        await db.leaders.write(record)

    async def take() -> LeaderRecord:
        async with server.connect().transaction() as db:
            return await db.leaders.lock("scheduler", new_term=True)

    async with database.transaction() as db:
        assert await db.leaders.share("scheduler") == record
        async with server.connect().transaction() as other:
            assert await other.leaders.share("scheduler") == record
            assert await other.leaders.lock("scheduler", new_term=False) == record
            await other.leaders.write(record.model_copy(update={"beat": 2}))
        task = asyncio.create_task(take())
        await server.until_waiting()
    assert (await task).beat == 2


async def test_the_rows_of_a_placement_are_locked_in_order_and_read_as_they_are_then(
    server: DatabaseServer, database: Database
) -> None:
    change = rules.create(REQUEST, 1.0)
    async with database.transaction() as db:
        await db.leaders.lock("scheduler", new_term=True)
        await db.leaders.write(LeaderRecord(name="scheduler", holder="h", term=3, beat=1))
        await db.workers.insert(worker())
        await db.changes.create(change)
    locked, placed = asyncio.Event(), asyncio.Event()

    async def place() -> LockedPlacement:
        async with server.connect().transaction() as db:
            found = await db.placements.lock("scheduler", "wk_1", "s1")
            locked.set()
            await placed.wait()
            return found

    async def lead() -> int:
        async with server.connect().transaction() as db:
            return (await db.leaders.lock("scheduler", new_term=True)).term

    async def read() -> None:
        async with server.connect().transaction() as db:
            await db.sessions.get_row("s1", lock=True)

    async with database.transaction() as db:
        await db.workers.get("wk_1", lock=True)
        placing = asyncio.create_task(place())
        await server.until_waiting()
        leading = asyncio.create_task(lead())
        # It holds the term, waits for the worker, and has not locked the session.
        await server.until_waiting(2)
        async with server.connect().transaction() as other:
            row = await other.sessions.get_row("s1", lock=True)
            assert row is not None
            await other.changes.write(Change(row.record.model_copy(update={"version": 2})))
        await db.workers.write(worker(capacity=5))
    await locked.wait()
    reading = asyncio.create_task(read())
    # Now it holds the session, too.
    await server.until_waiting(2)
    async with database.transaction() as db:
        assert await db.workers.lock_free(["wk_1"]) == {}
    placed.set()
    found = await placing
    await reading
    assert found.worker is not None
    assert found.session is not None
    assert (found.leader.term, found.worker.capacity, found.session.record.version) == (3, 5, 2)
    assert await leading == 3


async def test_a_placement_finds_what_is_missing(database: Database) -> None:
    async with database.transaction() as db:
        found = await db.placements.lock("scheduler", "wk_1", "s1")
        assert found == LockedPlacement(LeaderRecord(name="scheduler"), None, None)
        await db.changes.create(rules.create(REQUEST, 1.0))
        session = (await db.placements.lock("scheduler", "wk_1", "s1")).session
        assert session is not None
        assert session.record.id == "s1"


async def test_the_next_placement_on_a_worker_counts_the_one_that_it_has_waited_for(
    server: DatabaseServer, database: Database
) -> None:
    first = rules.create(REQUEST, 1.0)
    second = rules.create(REQUEST.model_copy(update={"id": "s2"}), 1.0)
    async with database.transaction() as db:
        await db.workers.insert(worker())
        await db.changes.create(first)
        await db.changes.create(second)

    async def count() -> int:
        async with server.connect().transaction() as db:
            await db.placements.lock("scheduler", "wk_1", "s2")
            return await db.admission.slots_used("wk_1", besides="s2")

    async with database.transaction() as db:
        await db.placements.lock("scheduler", "wk_1", "s1")
        counting = asyncio.create_task(count())
        await server.until_waiting()
        here = {"worker": "wk_1", "phase": Phase.ACTIVE, "epoch": 1, "version": 2}
        await db.changes.write(Change(first.record.model_copy(update=here)))
    assert await counting == 1


async def test_a_creation_reads_its_tenant_as_it_is_once_it_is_locked(
    server: DatabaseServer, database: Database
) -> None:
    async with database.transaction() as db:
        await db.tenants.lock("t")

    async def charge() -> int:
        async with server.connect().transaction(admits=True) as db:
            census = await db.admission.census(
                "s1", "m", "t", renewed_after=0.0, known_after=0.0, locks_tenant=True
            )
            assert census.tenant is not None
            assert census.live == 0
            more = replace(census.tenant, stored_bytes=census.tenant.stored_bytes + 1)
            await db.changes.create(rules.create(REQUEST, 1.0), more)
            return more.stored_bytes

    async with database.transaction() as db:
        row = await db.tenants.lock("t")
        charging = asyncio.create_task(charge())
        await server.until_waiting()
        # The counts are of the moment before the wait.
        async with server.connect().transaction() as other:
            await other.changes.create(rules.create(REQUEST.model_copy(update={"id": "s2"}), 1.0))
        await db.tenants.write(replace(row, stored_bytes=7))
    assert await charging == 8
    async with database.transaction() as db:
        assert (await db.tenants.lock("t")).stored_bytes == 8


async def test_advisory_locks_are_held_until_the_end(server: DatabaseServer, database: Database) -> None:
    order: list[str] = []

    async def second() -> None:
        async with server.connect().transaction(admits=True):
            order.append("second")

    async with database.transaction(admits=True):
        # Another lock, and a transaction that admits nothing.
        async with server.connect().transaction() as other:
            await other.rentals.lock()
        task = asyncio.create_task(second())
        await server.until_waiting()
        order.append("first")
    await task
    assert order == ["first", "second"]


async def test_those_that_wait_to_admit_leave_connections_to_others(
    server: DatabaseServer, database: Database
) -> None:
    begun: list[int] = []

    async def admit(number: int) -> None:
        begun.append(number)
        async with database.transaction(admits=True):
            pass

    more = 3 * Settings().postgres_pool
    async with server.connect().transaction(admits=True):
        waiting = [asyncio.create_task(admit(number)) for number in range(more)]
        while len(begun) < more:
            await asyncio.sleep(0)
        assert await capacity(database) is None
        assert not any(task.done() for task in waiting)
    await asyncio.gather(*waiting)


async def test_of_two_that_wait_for_each_other_one_is_given_up(
    server: DatabaseServer, database: Database
) -> None:
    async with database.transaction() as db:
        await db.workers.insert(worker("wk_1"))
        await db.workers.insert(worker("wk_2"))

    async def both(first: str, second: str, mine: asyncio.Event, others: asyncio.Event) -> str:
        try:
            async with server.connect().transaction() as db:
                await db.workers.get(first, lock=True)
                mine.set()
                await others.wait()
                await db.workers.get(second, lock=True)
        except UnavailableError:
            return "given up"
        return "done"

    one, two = asyncio.Event(), asyncio.Event()
    results = await asyncio.gather(both("wk_1", "wk_2", one, two), both("wk_2", "wk_1", two, one))
    assert sorted(results) == ["done", "given up"]


async def test_a_lock_is_not_waited_for_beyond_the_deadline(
    server: DatabaseServer, database: Database
) -> None:
    async with database.transaction() as db:
        await db.workers.insert(worker())
    async with database.transaction() as db:
        await db.workers.get("wk_1", lock=True)
        with pytest.raises(UnavailableError):
            async with server.connect(SHORT_S).transaction() as other:
                await other.workers.get("wk_1", lock=True)
        # The transaction that waited holds nothing now.
        await db.workers.write(worker(capacity=3))
    assert await capacity(database) == 3


async def test_a_transaction_that_stands_still_is_given_up_with_its_locks(
    server: DatabaseServer, database: Database
) -> None:
    async with database.transaction() as db:
        await db.workers.insert(worker())

    locked, done = asyncio.Event(), asyncio.Event()

    async def stand_still() -> None:
        async with server.connect(SHORT_S).transaction() as db:
            await db.workers.get("wk_1", lock=True)
            locked.set()
            await done.wait()
            await db.workers.write(worker(capacity=9))

    task = asyncio.create_task(unless_late(stand_still, locked))
    await locked.wait()
    async with database.transaction() as db:
        # Waits until the server or the client has ended the other one.
        assert await db.workers.get("wk_1", lock=True) is not None
        done.set()
        with pytest.raises(UnavailableError):
            await task
    assert await capacity(database) == 1


async def test_a_single_statement_is_committed_by_itself(server: DatabaseServer, database: Database) -> None:
    other = server.connect()
    with suppress(ZeroDivisionError):
        async with database.statement() as db:
            assert await db.workers.insert(worker())
            assert await capacity(other) == 1
            raise ZeroDivisionError
    assert await capacity(other) == 1


async def test_one_at_a_time_is_exclusive_and_no_row_stays_locked(
    server: DatabaseServer, database: Database
) -> None:
    order: list[str] = []

    async def second() -> None:
        async with server.connect().exclusive(KEY) as db:
            order.append("second")
            assert await db.outbox.oldest(9) == []

    async with database.transaction() as db:
        await db.outbox.add([worker_rules.joined_event(worker(), 1.0)])
    async with database.exclusive(KEY) as db:
        [event] = await db.outbox.oldest(9)
        task = asyncio.create_task(second())
        await server.until_waiting()
        # Another key is another lock, and nothing is locked but the key.
        async with server.connect().exclusive(KEY + 1) as other:
            assert len(await other.outbox.oldest(9)) == 1
        await db.outbox.remove([event.number])
        async with server.connect().transaction() as other:
            assert await other.outbox.oldest(9) == []
        order.append("first")
    await task
    assert order == ["first", "second"]


@pytest.mark.parametrize("how", ["raises", "cancelled", "silent"])
async def test_the_exclusive_lock_ends_with_its_holder(
    server: DatabaseServer, database: Database, how: str
) -> None:
    taken, goes_on = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with server.connect(SHORT_S if how == "silent" else 60.0).exclusive(KEY) as db:
            taken.set()
            await goes_on.wait()
            if how == "raises":
                raise ZeroDivisionError
            await db.outbox.oldest(1)

    task = asyncio.create_task(unless_late(hold, taken))
    await taken.wait()
    if how == "raises":
        goes_on.set()
    elif how == "cancelled":
        await stop(task)
    async with database.exclusive(KEY) as db:
        goes_on.set()
        await db.outbox.oldest(1)
    with suppress(ZeroDivisionError, UnavailableError, asyncio.CancelledError):
        await task


PATIENT_LOCK_S = 60.0
"""A holder that is delayed by a busy machine keeps its lock."""


async def test_a_session_lock_has_one_holder_until_its_block_ends(
    server: DatabaseServer, database: Database
) -> None:
    other = server.connect()
    async with database.session_lock(KEY, PATIENT_LOCK_S) as first:
        assert await first.acquire()
        await first.confirm()
        async with other.session_lock(KEY, PATIENT_LOCK_S) as second:
            assert not await second.acquire()
            async with other.session_lock(KEY + 1, PATIENT_LOCK_S) as third:
                assert await third.acquire()
    async with other.session_lock(KEY, PATIENT_LOCK_S) as second:
        async with asyncio.timeout(60):
            while not await second.acquire():
                await asyncio.sleep(0.02)


async def test_a_session_lock_whose_holder_is_silent_is_given_to_another(
    server: DatabaseServer, database: Database
) -> None:
    async with asyncio.timeout(4 * PATIENT_LOCK_S), AsyncExitStack() as stack:
        other = await stack.enter_async_context(server.connect().session_lock(KEY, PATIENT_LOCK_S))
        held = False
        while not held:
            async with AsyncExitStack() as attempt:
                silent = await attempt.enter_async_context(database.session_lock(KEY, 2.0))
                # A busy machine may take longer than the holder may be silent. A new holder tries then.
                with suppress(UnavailableError):
                    held = await silent.acquire()
                if held:
                    stack.push_async_exit(attempt.pop_all())
        await eventually(other.acquire)
        with pytest.raises(UnavailableError):
            await silent.confirm()


async def test_leaders_take_turns(server: DatabaseServer, database: Database) -> None:
    leads: list[int] = []

    async def lead_as(number: int, instance: Database) -> None:
        async def work() -> None:
            leads.append(number)
            await asyncio.Event().wait()

        await lead(instance, KEY, work, timeout_s=PATIENT_LOCK_S)

    tasks = {n: asyncio.create_task(lead_as(n, server.connect())) for n in (1, 2)}
    await eventually(lambda: leads)
    [first] = leads
    await stop(tasks[first])
    await eventually(lambda: len(leads) >= 2)
    assert leads == [first, 3 - first]
    await stop(*tasks.values())


async def test_where_one_work_ends_the_others_end_too_and_all_begin_again(database: Database) -> None:
    began: list[str] = []
    ended: list[str] = []

    async def short() -> None:
        began.append("short")
        if began.count("short") > 1:
            await asyncio.Event().wait()

    async def long() -> None:
        began.append("long")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("long")

    task = asyncio.create_task(lead(database, KEY, short, long, timeout_s=PATIENT_LOCK_S))
    await eventually(lambda: began.count("long") == 2)
    assert ended == ["long"]
    await stop(task)
    assert ended == ["long", "long"]


async def test_a_loss_of_the_lead_ends_all_works_at_once(database: Database) -> None:
    began, ended, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

    async def long() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(lead(database, KEY, slow, long, timeout_s=PATIENT_LOCK_S))
    async with asyncio.timeout(60.0):
        await began.wait()
        task.cancel()
        await ended.wait()
    may_end.set()
    await stop(task)


async def test_what_did_not_wait_for_the_disk_is_committed_all_the_same(
    server: DatabaseServer, database: Database
) -> None:
    async with database.transaction(durable=False) as db:
        await db.workers.insert(worker())
    async with database.transaction(durable=False) as db:
        await db.make_durable()
        await db.workers.write(worker(capacity=2))
    assert await capacity(server.connect()) == 2


async def test_a_ping_says_that_the_server_takes_writes(database: Database) -> None:
    assert not database.reachable
    assert await database.ping()
    assert database.reachable


async def test_many_at_once_have_their_turns(server: DatabaseServer) -> None:
    database = server.connect()

    async def one(number: int) -> None:
        async with database.transaction() as db:
            await write_clock(db, f"clock{number % 3}", float(number))

    await asyncio.gather(*(one(number) for number in range(60)))
    async with database.transaction() as db:
        for rest in range(3):
            last = await db.clocks.get(f"clock{rest}")
            assert last is not None
            assert last.wall in range(rest, 60, 3)


async def test_a_suspended_session_has_left_when_it_was_suspended(database: Database) -> None:
    """Incident: each later change of its row, such as a migration or a prompt, was one more departure."""
    record = rules.create(REQUEST, 100.0).record

    async def left(since: float) -> int:
        async with database.statement() as db:
            return (await db.admission.outlook(record.model, since=since, renewed_after=0.0)).left

    async def change(at: float, **fields: object) -> None:
        nonlocal record
        more = {**fields, "updated_at": at, "version": record.version + 1}
        record = record.model_copy(update=more)
        async with database.transaction() as db:
            await db.changes.write(Change(record, ()))

    async with database.transaction() as db:
        await db.changes.create(rules.create(REQUEST, 100.0))
    assert await left(since=0.0) == 0
    await change(200.0, phase=Phase.SUSPENDED, activity=Activity.PAUSED)
    await change(900.0, max_lead_s=1.0)
    assert (await left(since=199.0), await left(since=200.0)) == (1, 0)
    await change(950.0, phase=Phase.ACTIVE, activity=Activity.WATCHING)
    assert await left(since=0.0) == 0
    await change(960.0, phase=Phase.SUSPENDED, activity=Activity.PAUSED)
    assert (await left(since=959.0), await left(since=960.0)) == (1, 0)

"""The outbox with a slow broker: the locks it holds meanwhile, and the work that may continue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.helpers.waiting import eventually
from tests.state_store.database_servers import DatabaseServer
from tests.state_store.state_store_harness import PATIENT, no_fence
from turboserve.bus import Ack, Bus, append
from turboserve.clock import SystemClock
from turboserve.contracts.errors import DeadlineError, UnavailableError
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.simulation.runtime.broker import MemoryBroker
from turboserve.state_store.core.workers import joined_event
from turboserve.state_store.ports.database import Database
from turboserve.state_store.publish import outbox
from turboserve.state_store.publish.outbox import Outbox
from turboserve.state_store.settings import Settings
from turboserve.state_store.streams import Streams
from turboserve.subjects import EVENTS
from turboserve.tasks import stop

SHORT_S = 1.0
SETTINGS = Settings(nats_url="nats://state-store@memory", **PATIENT)


@pytest.fixture
async def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def bus(broker: MemoryBroker) -> Any:
    bus = await Bus.connect("state-store", SETTINGS, broker.connect)
    await Streams(bus, SystemClock(), SETTINGS, no_fence).ensure(resize=True)
    yield bus
    await bus.close()


async def tell(database: Database, count: int, first: int = 0, worker: str = "wk_1") -> list[str]:
    """Commit `count` events of one worker, numbered from `first`. Returns their ids."""
    record = WorkerRecord(
        id=worker, model="m", phase=WorkerPhase.READY, capacity=1, started_at=1.0, renewed_at=1.0
    )
    now = SystemClock().wall()
    names = [f"ev_{number}" for number in range(first, first + count)]
    events = [joined_event(record, now).model_copy(update={"id": name}) for name in names]
    async with database.transaction() as db:
        await db.outbox.add(events)
    return [event.id for event in events]


def logged(broker: MemoryBroker) -> list[str]:
    """Return the message ids in the event log."""
    stored = broker.jetstream.streams[EVENTS].from_sequence(1)
    return [one.headers["Nats-Msg-Id"] for one in stored]


class Held:
    """Appends wait until they are released."""

    def __init__(self) -> None:
        self.asked, self.let_go = asyncio.Event(), asyncio.Event()
        self.ids: list[str] = []
        """Message ids of the appends so far."""

    async def append(self, *arguments: Any, **options: Any) -> Ack:
        self.asked.set()
        self.ids.append(options["message_id"])
        await self.let_go.wait()
        return await append(*arguments, **options)


async def test_while_the_broker_is_frozen_no_row_is_locked_and_no_transaction_open(
    server: DatabaseServer, database: Database, broker: MemoryBroker, bus: Bus, monkeypatch: Any
) -> None:
    ids = await tell(database, 3)
    held = Held()
    monkeypatch.setattr(outbox, "append", held.append)
    broker.freeze(3_600.0)
    publisher = Outbox(server.connect(), bus, SystemClock(), SETTINGS)
    turn = asyncio.create_task(publisher.drain())
    await held.asked.wait()
    assert await server.open_transactions() == 0
    # Other transactions write and lock the same rows at once.
    async with server.connect().transaction() as db:
        [first, *_] = await db.outbox.oldest(1)
        await db.outbox.remove([first.number])
    assert not turn.done()
    held.let_go.set()
    with pytest.raises(DeadlineError):
        await turn
    broker.repair()
    while await publisher.drain():
        pass
    assert logged(broker) == ids
    async with database.statement() as db:
        assert await db.outbox.backlog() == (0, None)


async def test_who_is_held_up_in_an_append_is_overtaken_and_repeats_nothing(
    server: DatabaseServer, database: Database, broker: MemoryBroker, bus: Bus, monkeypatch: Any
) -> None:
    """As with a stopped process: its lock ends by itself, and another instance publishes everything.

    The broker recognizes what the stopped instance sends afterwards as repeated.
    """
    ids = await tell(database, 4)
    held = Held()
    short = SETTINGS.model_copy(update={"transaction_deadline_s": SHORT_S})
    stopped = Outbox(server.connect(SHORT_S), bus, SystemClock(), short)
    monkeypatch.setattr(outbox, "append", held.append)
    turn = asyncio.create_task(stopped.drain())
    asked = asyncio.create_task(held.asked.wait())
    while not asked.done():
        # A busy machine may take longer than its deadline before it reaches the append.
        if turn.done():
            assert turn.exception() is None or isinstance(turn.exception(), UnavailableError)
            turn = asyncio.create_task(stopped.drain())
        await asyncio.wait({turn, asked}, return_when=asyncio.FIRST_COMPLETED)
    monkeypatch.setattr(outbox, "append", append)
    other = Outbox(server.connect(), bus, SystemClock(), SETTINGS)
    while await other.drain():
        pass
    assert logged(broker) == ids
    held.let_go.set()
    with pytest.raises(UnavailableError):
        await turn
    assert logged(broker) == ids
    async with database.statement() as db:
        assert await db.outbox.backlog() == (0, None)


@pytest.mark.parametrize("late", [False, True])
async def test_a_turn_goes_on_with_what_is_committed_meanwhile_unless_it_is_late(
    late: bool, server: DatabaseServer, database: Database, broker: MemoryBroker, bus: Bus, monkeypatch: Any
) -> None:
    first = await tell(database, 1)
    held = Held()
    monkeypatch.setattr(outbox, "append", held.append)
    monkeypatch.setattr(outbox, "TURN_S", 3_600.0)
    monkeypatch.setattr(outbox, "READ_ON_S", -1.0 if late else 3_600.0)
    publisher = Outbox(server.connect(), bus, SystemClock(), SETTINGS)
    turn = asyncio.create_task(publisher.drain())
    await held.asked.wait()
    second = await tell(database, 1, first=1)
    publisher.wake()
    held.let_go.set()
    assert not await turn
    assert logged(broker) == first + ([] if late else second)
    publishing = asyncio.create_task(publisher.run())
    # A later turn publishes what a late one has left.
    await eventually(lambda: logged(broker) == first + second)
    await stop(publishing)


async def test_events_of_different_subjects_wait_for_the_broker_together(
    server: DatabaseServer, database: Database, broker: MemoryBroker, bus: Bus, monkeypatch: Any
) -> None:
    """Each waited for the acknowledgment of the one before. Those of one subject still do."""
    one, other, again, last = [
        (await tell(database, 1, first, worker))[0]
        for first, worker in enumerate(("wk_1", "wk_2", "wk_1", "wk_3"))
    ]
    held, refused = Held(), asyncio.Event()

    async def refuse_the_second(*arguments: Any, **options: Any) -> Ack:
        ack = await held.append(*arguments, **options)
        if options["message_id"] == again and not refused.is_set():
            refused.set()
            raise UnavailableError("the broker refuses once")
        return ack

    monkeypatch.setattr(outbox, "append", refuse_the_second)
    publisher = Outbox(server.connect(), bus, SystemClock(), SETTINGS)
    turn = asyncio.create_task(publisher.drain())
    await eventually(lambda: held.ids == [one, other])
    held.let_go.set()
    with pytest.raises(UnavailableError):
        await turn
    assert held.ids == [one, other, again, last]
    while await publisher.drain():
        pass
    # Only what failed is repeated.
    assert held.ids == [one, other, again, last, again]
    async with database.statement() as db:
        assert await db.outbox.backlog() == (0, None)


async def test_of_two_instances_one_publishes_at_a_time(
    server: DatabaseServer, database: Database, broker: MemoryBroker, bus: Bus, monkeypatch: Any
) -> None:
    ids = await tell(database, 2)
    held = Held()
    monkeypatch.setattr(outbox, "append", held.append)
    turns = [
        asyncio.create_task(Outbox(server.connect(), bus, SystemClock(), SETTINGS).drain()) for _ in range(2)
    ]
    await held.asked.wait()
    await server.until_waiting()
    assert logged(broker) == []
    held.let_go.set()
    await asyncio.gather(*turns)
    assert logged(broker) == ids

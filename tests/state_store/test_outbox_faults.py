"""Two publishers under faults on virtual time: each event is in the log once and in order."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest

from tests.state_store.state_store_harness import no_fence
from turboserve.bus import Bus
from turboserve.contracts.errors import UnavailableError
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.simulation.runtime.broker import MemoryBroker, Network
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.runtime.process import Process
from turboserve.simulation.runtime.rows.behavior import PostgresBehavior
from turboserve.simulation.runtime.rows.database import MemoryDatabase
from turboserve.simulation.runtime.rows.server import MemoryPostgres
from turboserve.simulation.service import HostClock
from turboserve.state_store.core.workers import joined_event
from turboserve.state_store.publish.outbox import Outbox
from turboserve.state_store.settings import Settings
from turboserve.state_store.streams import Streams
from turboserve.subjects import EVENTS

SETTINGS = Settings(nats_url="nats://state-store@memory", sweep_s=0.5)
SUBJECTS = 3
FAULTS_S = 20.0


class World:
    """Servers, one process that commits events, and two that publish them."""

    def __init__(self, seed: int) -> None:
        self.loop = VirtualLoop(seed)
        self.random = random.Random(seed)
        self.clock = HostClock(self.loop)
        behavior = PostgresBehavior(random.Random(seed), statement_s=0.002, in_doubt=0.02)
        self.postgres = MemoryPostgres(behavior, self.loop)
        self.postgres.on_commit = self._committed
        self.broker = MemoryBroker(random.Random(seed), Network(0.001), loop=self.loop)
        self.publishers = [Process("first"), Process("second")]
        self.committed: dict[str, list[str]] = defaultdict(list)
        self._numbers: dict[str, int] = {}
        self._seen: set[str] = set()

    def _committed(self, table: Any, key: Any, before: Any, after: Any) -> None:
        if table.name == "outbox" and after is not None:
            assert self._numbers.get(after.subject, 0) < key
            self._numbers[after.subject] = key
            if after.event_id not in self._seen:
                self._seen.add(after.event_id)
                self.committed[after.subject].append(after.event_id)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(self.loop.spawn(Process("setup"), work))

    async def prepare(self) -> None:
        bus = await Bus.connect("state-store", SETTINGS, self.broker.connect)
        await Streams(bus, self.clock, SETTINGS, no_fence).ensure(resize=True)

    async def write(self, until_s: float) -> None:
        """Commit events; those of one subject one after the other."""
        database = MemoryDatabase(self.postgres)

        async def one(number: int) -> None:
            record = WorkerRecord(
                id=f"wk_{number}",
                model="m",
                phase=WorkerPhase.READY,
                capacity=1,
                started_at=1.0,
                renewed_at=1.0,
            )
            count = 0
            while self.loop.time() < until_s:
                count += 1
                event = joined_event(record, self.clock.wall())
                event = event.model_copy(update={"id": f"ev_{number}_{count}"})
                with suppress(UnavailableError):
                    async with database.transaction() as db:
                        await db.outbox.add([event])
                await asyncio.sleep(self.random.expovariate(4.0))

        await asyncio.gather(*(one(number) for number in range(SUBJECTS)))

    async def publish(self) -> None:
        """Run one incarnation of a publisher."""
        bus = await Bus.connect("state-store", SETTINGS, self.broker.connect)
        database = MemoryDatabase(self.postgres, deadline_s=SETTINGS.transaction_deadline_s)
        await Outbox(database, bus, self.clock, SETTINGS).run()

    def start(self, index: int) -> None:
        self.publishers[index] = Process(f"publisher{index}")
        self.loop.spawn(self.publishers[index], self.publish())

    def problem(self) -> None:
        """Inject one fault, drawn from the seed."""
        index = self.random.randrange(2)
        match self.random.randrange(8):
            case 0 | 1 | 2:
                self.loop.kill(self.publishers[index])
                self.start(index)
            case 3 | 4:
                self.loop.freeze(self.publishers[index], self.random.uniform(0.1, 8.0))
            case 5:
                self.broker.freeze(self.random.uniform(0.1, 4.0))
            case 6:
                self.broker.stop()
                self.loop.call_later(self.random.uniform(0.1, 2.0), self.broker.start)
            case 7:
                self.postgres.crash()
                self.loop.call_later(self.random.uniform(0.1, 2.0), self.postgres.start)

    def logged(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for one in self.broker.jetstream.streams[EVENTS].from_sequence(1):
            found[one.subject].append(one.headers["Nats-Msg-Id"])
        return found


@pytest.mark.parametrize("seed", range(25))
def test_each_event_is_in_the_log_once_and_in_the_order_of_commits(seed: int) -> None:
    world = World(seed)
    world.run(world.prepare())
    world.start(0)
    world.start(1)
    world.loop.spawn(Process("writer"), world.write(FAULTS_S))
    while world.loop.time() < FAULTS_S:
        world.loop.advance(world.random.expovariate(2.0))
        world.problem()
    world.loop.advance(60.0)
    assert sum(map(len, world.committed.values())) > 50
    assert world.logged() == world.committed
    assert world.postgres.tables.outbox.rows == {}
    world.loop.close()


STEPS_S = [number * 0.0005 for number in range(1, 40)]


def stopped_in_its_turn(step_s: float) -> World:
    """Return a world with events to publish, whose first publisher has run for `step_s`."""
    world = World(1)
    world.postgres.behavior.in_doubt = 0.0
    world.postgres.behavior.varied = False
    world.run(world.prepare())
    world.run(world.write(world.loop.time() + 0.5))
    world.start(0)
    world.loop.advance(step_s)
    return world


def all_is_published(world: World, after_s: float) -> None:
    world.start(1)
    world.loop.advance(after_s)
    assert world.logged() == world.committed
    assert world.postgres.tables.outbox.rows == {}
    world.loop.close()


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_publisher_may_die_between_any_two_steps(step_s: float) -> None:
    """The steps of its turn are lock, read, append, removal and unlock."""
    world = stopped_in_its_turn(step_s)
    world.loop.kill(world.publishers[0])
    all_is_published(world, after_s=20.0)


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_publisher_may_be_stopped_for_longer_than_the_broker_remembers_ids(step_s: float) -> None:
    world = stopped_in_its_turn(step_s)
    world.loop.freeze(world.publishers[0], 3 * SETTINGS.duplicate_window_s)
    all_is_published(world, after_s=4 * SETTINGS.duplicate_window_s)

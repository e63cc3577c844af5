"""The database in memory under faults: crashes, commits in doubt, a full disk, frozen and killed clients."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from turboserve.contracts.errors import UnavailableError
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.runtime.process import Process
from turboserve.simulation.runtime.rows.behavior import PostgresBehavior
from turboserve.simulation.runtime.rows.database import MemoryDatabase
from turboserve.simulation.runtime.rows.server import MemoryPostgres
from turboserve.state_store.core.workers import joined_event

DEADLINE_S = 2.5


class World:
    """One server on a virtual loop, and processes that use it."""

    def __init__(self, seed: int = 1, **behavior: Any) -> None:
        self.loop = VirtualLoop(seed)
        options = {"statement_s": 0.002, "varied": False, **behavior}
        self.behavior = PostgresBehavior(random.Random(seed), **options)
        self.server = MemoryPostgres(self.behavior, self.loop)
        self.log: list[str] = []

    def run(self, work: Callable[[MemoryDatabase], Awaitable[Any]], process: Process | None = None) -> Any:
        """Run `work` as a task of a process, to its end."""
        return self.loop.run_until_complete(self.start(work, process))

    def start(self, work: Callable[[MemoryDatabase], Awaitable[Any]], process: Process | None = None) -> Any:
        async def body() -> Any:
            return await work(MemoryDatabase(self.server, deadline_s=DEADLINE_S))

        return self.loop.spawn(process or Process("store"), body())

    def capacity(self, name: str = "wk_1") -> int | None:
        entry = self.server.tables.workers.rows.get(name)
        return None if entry is None else entry.record.capacity


@pytest.fixture
def world() -> Any:
    world = World()
    yield world
    world.loop.close()


def worker(name: str = "wk_1", capacity: int = 1) -> WorkerRecord:
    return WorkerRecord(
        id=name, model="m", phase=WorkerPhase.READY, capacity=capacity, started_at=1.0, renewed_at=1.0
    )


def put(name: str = "wk_1", capacity: int = 1, *, durable: bool = True) -> Callable[[MemoryDatabase], Any]:
    async def work(database: MemoryDatabase) -> None:
        async with database.transaction(durable=durable) as db:
            if not await db.workers.insert(worker(name, capacity)):
                await db.workers.get(name, lock=True)
                await db.workers.write(worker(name, capacity))

    return work


def test_the_statements_of_a_transaction_may_take_their_time_at_its_commit() -> None:
    ends: list[float] = []
    callbacks: list[int] = []
    for at_commit in (False, True):
        world = World(at_commit=at_commit)

        async def work(database: MemoryDatabase, world: World = world) -> None:
            async with database.transaction() as db:
                await db.workers.insert(worker("wk_1"))
                await db.workers.insert(worker("wk_2"))
                assert world.capacity("wk_1") is None
            assert world.capacity("wk_2") == 1

        world.run(work)
        # One that another transaction blocks waits for its end.
        first, second = world.start(put("wk_1", 2)), world.start(put("wk_1", 3))
        world.loop.run_until_complete(first)
        world.loop.run_until_complete(second)
        assert world.capacity("wk_1") == 3
        ends.append(world.loop.time())
        callbacks.append(world.loop.callbacks)
        world.loop.close()
    # Two statements and a commit. Then three statements and a commit twice, of which the second waits for the
    # first: what it has sent by then takes its time before the first's commit, or at its own commit.
    assert ends == pytest.approx([9 * 0.002, 11 * 0.002])
    assert callbacks[1] < callbacks[0] / 1.5


def test_a_crash_takes_back_only_what_did_not_wait_for_the_disk(world: World) -> None:
    kept = set()
    for round_ in range(40):
        world.run(put("wk_1", 1))
        for capacity in (2, 3, 4):
            world.run(put("wk_1", capacity, durable=False))
        world.server.crash()
        with pytest.raises(UnavailableError):
            world.run(put("wk_1", 9))
        world.server.start()
        kept.add(world.capacity())
        if round_ % 2:
            world.run(put("wk_1", 7))
            world.server.crash()
            world.server.start()
            assert world.capacity() == 7
    assert kept == {1, 2, 3, 4}


def test_old_messages_are_on_disk_without_a_waiting_client(world: World) -> None:
    world.run(put("wk_1", 1, durable=False))
    world.loop.advance(1.0)
    for _ in range(20):
        world.server.crash()
        world.server.start()
        assert world.capacity() == 1


def test_a_crash_tells_what_it_takes_back(world: World) -> None:
    world.server.on_lost = lambda table, key, before, after: world.log.append(f"{table.name} {key}")
    while not world.log:
        world.run(put("wk_1", len(world.log) + 1, durable=False))
        world.server.crash()
        world.server.start()
    assert world.log == ["workers wk_1"]


def test_of_a_commit_in_doubt_both_outcomes_occur() -> None:
    world = World(in_doubt=1.0)
    outcomes = set()
    for number in range(30):
        with pytest.raises(UnavailableError):
            world.run(put(f"wk_{number}"))
        outcomes.add(world.capacity(f"wk_{number}") is not None)
        assert world.server.locks.waiting == 0
    world.behavior.in_doubt = 0.0
    world.run(put("wk_0", 5))
    assert (outcomes, world.capacity("wk_0")) == ({True, False}, 5)
    world.loop.close()


def test_a_single_statement_that_writes_may_be_in_doubt_too() -> None:
    world = World(in_doubt=0.5)
    outcomes = set()

    async def insert(database: MemoryDatabase) -> str:
        try:
            async with database.statement() as db:
                await db.workers.insert(worker(f"wk_{len(world.log)}"))
        except UnavailableError:
            return "in doubt"
        return "done"

    async def read(database: MemoryDatabase) -> None:
        async with database.statement() as db:
            await db.workers.get("wk_0")

    for number in range(40):
        said = world.run(insert)
        outcomes.add((said, world.capacity(f"wk_{number}") is not None))
        world.log.append(said)
        # A transaction that only reads has no outcome.
        world.run(read)
    assert outcomes == {("done", True), ("in doubt", True), ("in doubt", False)}
    world.loop.close()


def test_a_killed_process_holds_no_lock_and_commits_all_or_nothing(world: World) -> None:
    outcomes = set()
    for steps in range(1, 40):
        name = f"wk_{steps}"
        process = Process("victim")
        world.start(put(name, 3), process)
        world.loop.advance(steps * 0.0002)
        world.loop.kill(process)
        world.run(put(f"{name}_other"))
        # All its locks are released, and all that it sent has arrived.
        world.loop.advance(0.1)
        outcomes.add(world.capacity(name))
        world.run(put(name, 8))
        assert world.capacity(name) == 8
    assert outcomes == {None, 3}


def test_a_frozen_process_keeps_its_locks_until_the_server_ends_its_session(world: World) -> None:
    world.run(put())
    frozen = Process("frozen")
    seen: list[str] = []

    async def hold(database: MemoryDatabase) -> None:
        try:
            async with database.transaction() as db:
                await db.workers.get("wk_1", lock=True)
                world.loop.freeze(frozen, 10.0)
                await db.workers.write(worker(capacity=9))
        except UnavailableError:
            seen.append(f"{world.loop.time():.0f} given up")

    world.start(hold, frozen)
    world.loop.advance(0.1)
    with pytest.raises(UnavailableError):
        # Its deadline is slightly before the release of the frozen process's lock.
        world.run(_lock_with(0.5))
    world.run(put(capacity=4))
    assert DEADLINE_S < world.loop.time() < 2 * DEADLINE_S
    world.loop.advance(10.0)
    assert seen == ["10 given up"]
    assert world.capacity() == 4


def _lock_with(deadline_s: float) -> Callable[[MemoryDatabase], Any]:
    async def work(database: MemoryDatabase) -> None:
        async with MemoryDatabase(database._server, deadline_s=deadline_s).transaction() as db:
            await db.workers.get("wk_1", lock=True)

    return work


def test_a_commit_that_was_sent_before_a_freeze_is_done_during_it(world: World) -> None:
    process = Process("frozen")

    async def work(database: MemoryDatabase) -> str:
        async with database.transaction() as db:
            await db.workers.insert(worker())
            # The freeze begins at the process's next callback, which receives the commit's answer.
            world.loop.call_later(0.0001, lambda: world.loop.freeze(process, 30.0))
        return f"{world.loop.time():.0f}"

    task = world.start(work, process)
    world.loop.advance(1.0)
    assert world.capacity() == 1
    assert world.loop.run_until_complete(task) == "30"


def test_a_frozen_server_answers_no_request_and_processes_them_later(world: World) -> None:
    world.run(put())
    world.server.freeze(5.0)
    with pytest.raises(UnavailableError):
        world.run(put(capacity=2))
    assert 2.0 < world.loop.time() < 3.0
    world.loop.advance(5.0)
    assert world.capacity() == 1
    world.run(put(capacity=3))
    assert world.capacity() == 3


def test_a_slow_server_ends_what_takes_longer_than_the_deadline(world: World) -> None:
    world.server.slow_down(20.0, 0.5)
    world.run(put())
    world.server.slow_down(20.0, 3.0)
    with pytest.raises(UnavailableError):
        world.run(put(capacity=2))
    world.loop.advance(20.0)
    world.run(put(capacity=3))
    assert world.capacity() == 3


def test_a_full_disk_takes_no_new_rows_and_is_found_out(world: World) -> None:
    world.run(put())
    world.server.disk_full = True

    async def probe(database: MemoryDatabase) -> bool:
        return await database.ping()

    assert not world.run(probe)

    async def tell(database: MemoryDatabase) -> None:
        async with database.transaction() as db:
            await db.outbox.add([joined_event(worker(), 1.0)])

    with pytest.raises(UnavailableError):
        world.run(tell)
    updated = set()
    for _ in range(20):
        try:
            world.run(put(capacity=2))
            updated.add(True)
        except UnavailableError:
            updated.add(False)
    assert updated == {True, False}
    world.server.disk_full = False
    assert world.run(probe)


def test_a_leaders_lock_is_lost_while_it_is_frozen(world: World) -> None:
    frozen = Process("frozen")

    async def hold(database: MemoryDatabase) -> None:
        async with database.session_lock(1, 5.0) as lock:
            world.log.append(f"first {await lock.acquire()}")
            world.loop.freeze(frozen, 20.0)
            # Sent before the freeze, and answered during it.
            await lock.confirm()
            try:
                await lock.confirm()
            except UnavailableError:
                world.log.append("first lost it")

    async def follow(database: MemoryDatabase) -> None:
        async with database.session_lock(1, 5.0) as lock:
            world.log.append(f"second {await lock.acquire()}")

    world.start(hold, frozen)
    world.loop.advance(1.0)
    world.run(follow)
    world.loop.advance(6.0)
    world.run(follow)
    world.loop.advance(20.0)
    assert world.log == ["first True", "second False", "second True", "first lost it"]


def test_no_more_connections_than_there_are(world: World) -> None:
    async def work(database: MemoryDatabase) -> None:
        small = MemoryDatabase(world.server, deadline_s=DEADLINE_S, connections=1)
        async with small.transaction():
            with pytest.raises(UnavailableError):
                await _enter(small)
        await _enter(small)

    world.run(work)


async def _enter(database: MemoryDatabase) -> None:
    async with database.transaction() as db:
        await db.workers.get("wk_1")


def test_who_is_cut_off_reaches_nothing(world: World) -> None:
    async def work(database: MemoryDatabase) -> None:
        database.cut_off(1.0)
        with pytest.raises(UnavailableError):
            await _enter(database)

    world.run(work)


def test_the_same_seed_gives_the_same_run() -> None:
    def run_scenario(seed: int) -> tuple[float, int, list[str]]:
        world = World(seed, varied=True)
        world.server.on_commit = lambda table, key, before, after: world.log.append(
            f"{world.loop.time()} {key} {after}"
        )
        tasks = [world.start(put(f"wk_{number % 3}", number + 1)) for number in range(30)]
        for task in tasks:
            world.loop.run_until_complete(task)
        world.loop.close()
        return world.loop.time(), world.loop.callbacks, world.log

    assert run_scenario(3) == run_scenario(3)
    assert run_scenario(3) != run_scenario(4)

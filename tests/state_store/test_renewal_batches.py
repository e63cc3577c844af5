"""Which renewals share a transaction, and when each is answered, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from turboserve.contracts.errors import TurboServeError, UnavailableError, WorkerGoneError
from turboserve.contracts.workers import LoadReport, Renewal, WorkerPhase, WorkerRecord
from turboserve.simulation.runtime.hot import MemoryHotStore, MemoryRedis
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.runtime.rows.behavior import PostgresBehavior
from turboserve.simulation.runtime.rows.database import MemoryDatabase
from turboserve.simulation.runtime.rows.server import MemoryPostgres
from turboserve.simulation.service import HostClock
from turboserve.state_store.hot.session_state import HotStoreGuard, Playheads
from turboserve.state_store.ports.database import unavailable
from turboserve.state_store.service.renewal_queue import (
    BATCH_SESSIONS,
    PendingRenewal,
    RenewalQueue,
    RenewedLease,
)
from turboserve.state_store.service.renewals import (
    BATCH_LIMIT,
    CONCURRENT_BATCHES,
    CONCURRENT_SINGLES,
    GATHER_S,
    Renewals,
)
from turboserve.state_store.service.transactions import PostCommit

DEADLINE_S = 2.5
LEASE_S = 8.0
HEARTBEAT_S = 1.0
STATEMENT_S = 0.002


def report(worker: str, *, capacity: int = 4, started_at: float = 1.0) -> LoadReport:
    return LoadReport(worker=worker, model="m", capacity=capacity, started_at=started_at)


class Scene:
    """Postgres in memory with rows of workers, and one instance's renewals."""

    def __init__(self, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = loop
        clock = HostClock(loop)
        self.postgres = MemoryPostgres(
            PostgresBehavior(loop.random, statement_s=STATEMENT_S, varied=False), loop
        )
        self.database = MemoryDatabase(self.postgres, deadline_s=DEADLINE_S)
        playheads = Playheads(HotStoreGuard(MemoryHotStore(MemoryRedis(loop=loop)), clock), clock)
        # No session has an owner without a fence.
        unused: Any = None
        monkeypatch.setattr(PostCommit, "events", lambda _: None)
        post_commit = PostCommit(unused, unused, unused, playheads)
        self.renewals = Renewals(self.database, post_commit, playheads, DEADLINE_S)
        self.others = Renewals(self.database, post_commit, playheads, DEADLINE_S)
        """Those of another instance."""
        self.singles = 0
        self.most_singles = 0
        self.batches: list[list[str]] = []
        """Workers of each shared transaction."""
        self.running = 0
        self.most_running = 0
        self.let_go = asyncio.Event()
        """While it is not set, shared transactions wait."""
        self.let_go.set()
        self.limit: int | None = None
        """Number of renewals above which a shared transaction takes too long."""
        share = Renewals._share_transaction

        async def counted(
            renewals: Renewals, batch: Mapping[str, PendingRenewal]
        ) -> Mapping[str, RenewedLease | TurboServeError]:
            self.batches.append([*batch])
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                await self.let_go.wait()
                if self.limit is not None and len(batch) > self.limit:
                    await asyncio.sleep(DEADLINE_S)
                    raise unavailable()
                return await share(renewals, batch)
            finally:
                self.running -= 1

        monkeypatch.setattr(Renewals, "_share_transaction", counted)
        single = Renewals._renew_one

        async def counted_single(renewals: Renewals, renewal: PendingRenewal) -> RenewedLease:
            self.singles += 1
            self.most_singles = max(self.most_singles, self.singles)
            try:
                return await single(renewals, renewal)
            finally:
                self.singles -= 1

        monkeypatch.setattr(Renewals, "_renew_one", counted_single)

    async def join(self, count: int, started_at: float = 1.0) -> list[str]:
        """Write rows of workers, and return their names. The first is for `gathering`."""
        names = [f"wk_{number}" for number in range(count)]
        async with self.database.transaction() as db:
            for name in names:
                await db.workers.insert(
                    WorkerRecord(
                        id=name,
                        model="m",
                        phase=WorkerPhase.READY,
                        capacity=4,
                        started_at=started_at,
                        renewed_at=0.0,
                    )
                )
        return names

    async def row(self, worker: str) -> WorkerRecord:
        async with self.database.statement() as db:
            record = await db.workers.get(worker)
        assert record is not None
        return record

    def renew(self, load: LoadReport) -> asyncio.Task[Renewal]:
        return asyncio.ensure_future(self.renewals.renew(load, 1_000.0 + self.loop.time()))

    @asynccontextmanager
    async def gathering(self) -> AsyncIterator[None]:
        """Let a renewal begin, so that those within the block share transactions."""
        await asyncio.sleep(2 * GATHER_S)
        first = self.renew(report("wk_0"))
        await asyncio.sleep(GATHER_S / 2)
        yield
        await asyncio.wait({first})
        first.exception()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Any:
    loop = VirtualLoop(1)

    def run(work: Any) -> None:
        async def within() -> None:
            await work(Scene(loop, monkeypatch))

        loop.run_until_complete(within())

    yield run
    loop.close()


Run = Any


def test_while_postgres_hangs_each_is_answered_in_time_and_each_lease_holds(scene: Run) -> None:
    """At one time, renewals waited for two hanging transactions and then for one more: 5 s in all. Workers
    give up after a third of the lease, and only an answer prolongs it, so that all of them stopped."""

    async def work(scene: Scene) -> None:
        workers = await scene.join(50)
        answers_s: list[float] = []
        lost: list[str] = []
        refused = 0
        most_waiting = 0

        async def live(worker: str) -> None:
            nonlocal refused, most_waiting
            await asyncio.sleep(scene.loop.random.uniform(0.0, HEARTBEAT_S))
            lease_until = scene.loop.time() + LEASE_S
            while scene.loop.time() < 40.0:
                asked = scene.loop.time()
                task = scene.renew(report(worker))
                answered, _ = await asyncio.wait({task}, timeout=LEASE_S / 3)
                most_waiting = max(most_waiting, len(scene.renewals._queue))
                if answered:
                    answers_s.append(scene.loop.time() - asked)
                    refused += isinstance(task.exception(), UnavailableError)
                    if asked < lease_until:
                        lease_until = asked + LEASE_S
                if scene.loop.time() > lease_until:
                    lost.append(worker)
                await asyncio.sleep(HEARTBEAT_S)

        scene.loop.call_later(5.0, scene.postgres.freeze, 20.0)
        began = scene.loop.time()
        await asyncio.gather(*(live(worker) for worker in workers))
        assert scene.loop.time() > began + 25.0
        assert refused > 50
        assert max(answers_s) <= DEADLINE_S + GATHER_S
        assert lost == []
        assert most_waiting <= len(workers)
        for worker in workers:
            assert (await scene.row(worker)).renewed_at > 1_000.0 + 36.0

    scene(work)


def test_a_deadline_before_the_transactions_is_kept_while_postgres_hangs(scene: Run) -> None:
    """With short times of failure detection, a worker waits for less time than a transaction may take."""

    async def work(scene: Scene) -> None:
        deadline_s = scene.renewals._deadline_s = DEADLINE_S / 5
        workers = await scene.join(20)
        scene.postgres.freeze(20.0)
        for _ in range(3):
            began = scene.loop.time()
            found = await asyncio.gather(
                *(scene.renew(report(worker)) for worker in workers), return_exceptions=True
            )
            assert {type(one) for one in found} == {UnavailableError}
            assert scene.loop.time() - began <= deadline_s + GATHER_S

    scene(work)


def test_locked_rows_delay_their_own_workers_alone_and_leave_connections_to_others(scene: Run) -> None:
    async def work(scene: Scene) -> None:
        *locked, free = await scene.join(4 * CONCURRENT_SINGLES)
        is_locked, release = asyncio.Event(), asyncio.Event()

        async def lock() -> None:
            async with scene.database.transaction() as db:
                for worker in locked:
                    await db.workers.get(worker, lock=True)
                is_locked.set()
                await release.wait()

        holder = asyncio.ensure_future(lock())
        await is_locked.wait()
        waiting = [scene.renew(report(worker)) for worker in locked]
        for _ in range(10):
            await asyncio.sleep(2 * GATHER_S)
            began = scene.loop.time()
            assert (await scene.renew(report(free))).worker == free
            assert scene.loop.time() - began < 5 * GATHER_S
        assert not any(task.done() for task in waiting)
        assert scene.most_singles == CONCURRENT_SINGLES
        release.set()
        await holder
        assert {type(one) for one in await asyncio.gather(*waiting)} == {Renewal}

    scene(work)


def test_of_two_processes_that_join_at_once_the_newer_has_the_row(scene: Run) -> None:
    """Each finds no row. One inserts it, and the other applies its rules to what was inserted."""

    async def work(scene: Scene) -> None:
        for worker, (first, second) in {"wk_a": (10.0, 20.0), "wk_b": (20.0, 10.0)}.items():
            found = await asyncio.gather(
                scene.renewals.renew(report(worker, started_at=first), 1_000.0),
                scene.others.renew(report(worker, started_at=second), 1_000.0),
                return_exceptions=True,
            )
            assert (await scene.row(worker)).started_at == 20.0
            assert Renewal in {type(one) for one in found}
            assert {type(one) for one in found} <= {Renewal, WorkerGoneError}
            await asyncio.sleep(2 * GATHER_S)

    scene(work)


def test_of_one_process_the_newest_report_answers_all_its_requests(scene: Run) -> None:
    async def work(scene: Scene) -> None:
        [_, worker] = await scene.join(2)
        async with scene.gathering():
            tasks = [scene.renew(report(worker, capacity=capacity)) for capacity in (5, 6, 7)]
        answers = await asyncio.gather(*tasks)
        assert [answer.worker for answer in answers] == [worker] * 3
        assert scene.batches == [[worker]]
        assert (await scene.row(worker)).capacity == 7

    scene(work)


def test_a_process_that_was_replaced_gets_no_answer_of_its_successor(scene: Run) -> None:
    async def work(scene: Scene) -> None:
        [_, worker] = await scene.join(2, started_at=20.0)
        async with scene.gathering():
            old = scene.renew(report(worker, started_at=10.0))
            new = scene.renew(report(worker, started_at=20.0))
        found = await asyncio.gather(old, new, return_exceptions=True)
        assert [type(one) for one in found] == [WorkerGoneError, Renewal]
        assert scene.batches == [[worker], [worker]]

    scene(work)


def test_more_than_fit_into_one_transaction_share_several(scene: Run) -> None:
    async def work(scene: Scene) -> None:
        workers = await scene.join(BATCH_LIMIT * 2 + 10)
        async with scene.gathering():
            tasks = [scene.renew(report(worker)) for worker in workers[1:]]
        await asyncio.gather(*tasks)
        assert [len(batch) for batch in scene.batches] == [BATCH_LIMIT, BATCH_LIMIT, 9]
        assert [name for batch in scene.batches for name in batch] == workers[1:]

    scene(work)


def test_while_shared_transactions_run_further_ones_wait(scene: Run) -> None:
    async def work(scene: Scene) -> None:
        workers = await scene.join(4)
        scene.let_go.clear()
        async with scene.gathering():
            tasks = [scene.renew(report(workers[1]))]
        for worker in workers[2:]:
            # Each has a batch of its own.
            async with scene.gathering():
                tasks.append(scene.renew(report(worker)))
        await asyncio.sleep(10 * GATHER_S)
        assert scene.batches == [[worker] for worker in workers[1 : 1 + CONCURRENT_BATCHES]]
        scene.let_go.set()
        await asyncio.gather(*tasks)
        assert scene.batches == [[worker] for worker in workers[1:]]
        assert scene.most_running == CONCURRENT_BATCHES

    scene(work)


def test_a_canceled_request_is_not_executed_and_disturbs_no_other(scene: Run) -> None:
    async def work(scene: Scene) -> None:
        [_, gone, there] = await scene.join(3)
        async with scene.gathering():
            canceled, awaited = scene.renew(report(gone)), scene.renew(report(there))
            await asyncio.sleep(0)
            canceled.cancel()
        assert (await awaited).worker == there
        assert scene.batches == [[there]]
        assert (await scene.row(gone)).renewed_at == 0.0
        # Canceled while its transaction runs.
        scene.let_go.clear()
        async with scene.gathering():
            canceled, awaited = scene.renew(report(gone)), scene.renew(report(there))
        await asyncio.sleep(2 * GATHER_S)
        assert scene.running == 1
        canceled.cancel()
        scene.let_go.set()
        assert (await awaited).worker == there

    scene(work)


def test_batches_are_smaller_after_one_that_took_too_long(scene: Run) -> None:
    async def work(scene: Scene) -> None:
        workers = await scene.join(BATCH_LIMIT + 1)
        scene.limit = BATCH_LIMIT // 4
        for _ in range(3):
            async with scene.gathering():
                tasks = [scene.renew(report(worker)) for worker in workers[1:]]
            found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in found] == [Renewal] * BATCH_LIMIT
        assert len(scene.batches[0]) == BATCH_LIMIT
        scene.limit = None
        for _ in range(30):
            async with scene.gathering():
                tasks = [scene.renew(report(worker)) for worker in workers[1:]]
            await asyncio.gather(*tasks)
        assert len(scene.batches[-1]) == BATCH_LIMIT

    scene(work)


def test_the_sessions_of_a_batch_are_limited(scene: Run) -> None:
    async def work(scene: Scene) -> None:
        queue = RenewalQueue()
        share = BATCH_SESSIONS // 2
        for name, sessions in (("wk_0", share), ("wk_1", share), ("wk_2", 1), ("wk_3", 2 * BATCH_SESSIONS)):
            held = frozenset(f"{name}_{number}" for number in range(sessions))
            queue.add(PendingRenewal(report(name), held, 0.0, DEADLINE_S))
        assert [[*queue.take(BATCH_LIMIT)] for _ in range(4)] == [["wk_0", "wk_1"], ["wk_2"], ["wk_3"], []]

    scene(work)

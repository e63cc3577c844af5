"""Placing, renewing, draining and losing workers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from sqlalchemy import text

from tests.helpers.waiting import eventually
from tests.state_store.conftest import StartStore
from tests.state_store.state_store_harness import PATIENT, Harness, Store
from turboserve import subjects
from turboserve.contracts.errors import (
    ConflictError,
    InvalidInputError,
    NoCapacityError,
    SessionNotFoundError,
    TransitionError,
    WorkerGoneError,
)
from turboserve.contracts.events import event_from_bytes
from turboserve.contracts.requests import DrainWorker, ListWorkers, WorkerGone
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import HeldSession, WorkerPhase, WorkerRecord
from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.settings import Settings

SERVERS = ("real", "memory")


async def listed(api: Harness, worker: str, *, gone: bool = False) -> WorkerRecord:
    page = await api.bus.call(subjects.LIST_WORKERS, ListWorkers(include_gone=gone))
    return next(record for record in page.workers if record.id == worker)


async def test_a_burst_never_overfills_a_worker_with_two_stores_answering(
    start_store: StartStore, settings: Settings
) -> None:
    await start_store()
    await start_store()
    async with Harness.connected(settings) as api:
        big, small = await api.worker("burst", capacity=12), await api.worker("burst", capacity=3)
        records = [await api.create("burst") for _ in range(12)]
        results = await asyncio.gather(
            *(api.place(record, small) for record in records), return_exceptions=True
        )
        placed = [result for result in results if isinstance(result, SessionRecord)]
        assert len(placed) == 3
        assert all(isinstance(result, NoCapacityError) for result in results if result not in placed)
        assert (await listed(api, small)).sessions == 3
        assert len((await api.renew(small, "burst", 3)).assigned) == 3

        await api.pause(placed[0].id)
        counted = await listed(api, small)
        assert (counted.sessions, counted.suspended) == (2, 1)
        rest = [record for record in records if record.id not in {row.id for row in placed}]
        await api.place(rest[0], small)
        resumed = await api.resume(placed[0].id)
        with pytest.raises(NoCapacityError):
            await api.place(resumed, small)
        assert (await api.place(resumed, big)).worker == big


async def test_of_many_placements_on_one_version_one_wins(api: Harness) -> None:
    workers = [await api.worker("race") for _ in range(6)]
    record = await api.create("race")
    results = await asyncio.gather(*(api.place(record, worker) for worker in workers), return_exceptions=True)
    won = [result for result in results if isinstance(result, SessionRecord)]
    assert len(won) == 1
    assert all(isinstance(result, ConflictError) for result in results if result not in won)
    row = await api.get(record.id)
    assert (row.epoch, row.worker) == (1, won[0].worker)


async def test_a_placement_whose_answer_was_lost_is_answered_again(api: Harness) -> None:
    worker = await api.worker("lost")
    record = await api.create("lost")
    first = await api.place(record, worker)
    again = await api.place(record, worker, version=record.version)
    assert (again.version, again.epoch) == (first.version, first.epoch)
    await api.prompt(record.id, "a prompt in between")
    assert (await api.place(record, worker)).epoch == first.epoch
    other = await api.worker("lost")
    with pytest.raises(ConflictError):
        await api.place(record, other)
    reassigned = await api.place(await api.get(record.id), other)
    with pytest.raises(ConflictError):
        await api.place(record, worker)
    assert (await api.get(record.id)).epoch == reassigned.epoch == 2


async def test_a_prompt_is_not_taken_for_the_placement_that_it_overtook(api: Harness) -> None:
    """Version and worker match, but a prompt made that version, and the session is suspended."""
    record = await api.running("overtaken")
    await api.pause(record.id)
    resumed = await api.resume(record.id)
    await api.prompt(record.id, "first")
    with pytest.raises(ConflictError):
        await api.place(resumed, str(record.worker))
    assert (await api.get(record.id)).phase is Phase.SUSPENDED


async def test_where_nothing_may_be_placed(api: Harness) -> None:
    await api.worker("where")
    session = await api.create("where")
    starting = await api.worker("where", phase=WorkerPhase.STARTING)
    draining = await api.worker("where")
    await api.bus.call(subjects.DRAIN_WORKER, DrainWorker(worker=draining))
    gone = await api.worker("where")
    await api.gone(gone)
    other = await api.worker("elsewhere")
    for worker, error in (
        (starting, NoCapacityError),
        (draining, NoCapacityError),
        (gone, WorkerGoneError),
        ("wk_never", WorkerGoneError),
        (other, InvalidInputError),
    ):
        with pytest.raises(error):
            await api.place(session, worker)
    with pytest.raises(SessionNotFoundError):
        await api.place(session.model_copy(update={"id": "ses_never"}), draining)
    ended = await api.end(session.id)
    with pytest.raises(TransitionError):
        await api.place(ended, await api.worker("where"))


async def test_a_drain_is_answered_with_the_renewal_and_stored(api: Harness) -> None:
    record = await api.running("drain")
    worker = str(record.worker)
    for _ in range(2):
        await api.bus.call(subjects.DRAIN_WORKER, DrainWorker(worker=worker))
        renewal = await api.renew(worker, "drain")
        assert renewal.drain
        assert [row.id for row in renewal.assigned] == [record.id]
    assert (await listed(api, worker)).phase is WorkerPhase.DRAINING


async def test_a_gone_worker_is_always_refused_and_its_sessions_wait(api: Harness) -> None:
    record = await api.running("gone")
    worker = str(record.worker)
    for reason in ("killed", "killed twice"):
        await api.gone(worker, reason)
    with pytest.raises(WorkerGoneError):
        await api.renew(worker, "gone")
    left = await listed(api, worker, gone=True)
    assert (left.phase, left.reason) == (WorkerPhase.GONE, "killed")
    page = await api.bus.call(subjects.LIST_WORKERS, ListWorkers())
    assert worker not in {item.id for item in page.workers}
    row = await api.get(record.id)
    assert (row.phase, row.worker, row.epoch) == (Phase.ACTIVE, worker, 1)
    recovered = await api.place(row, await api.worker("gone"), kind="recover")
    assert recovered.epoch == 2

    async def types() -> list[str]:
        history = await api.history(subjects.WORKER_EVENT.of(worker))
        return [event_from_bytes(body).type for _, body in history]

    async def reported() -> bool:
        return "worker.left" in await types()

    await eventually(reported)
    assert await types() == ["worker.joined", "worker.left"]


async def test_a_worker_that_renews_is_not_taken_for_dead(api: Harness) -> None:
    worker = await api.worker("silent")
    read = await listed(api, worker)
    await api.renew(worker, "silent")
    for renewed_at in (read.renewed_at, (await listed(api, worker)).renewed_at):
        with pytest.raises(ConflictError):
            await api.bus.call(
                subjects.WORKER_GONE, WorkerGone(worker=worker, reason="silent", renewed_at=renewed_at)
            )
    await api.renew(worker, "silent")
    assert (await listed(api, worker)).phase is WorkerPhase.READY


async def test_a_worker_that_says_goodbye_is_gone(api: Harness) -> None:
    worker = await api.worker("goodbye")
    await api.renew(worker, "goodbye", phase=WorkerPhase.GONE)
    assert (await listed(api, worker, gone=True)).phase is WorkerPhase.GONE
    with pytest.raises(WorkerGoneError):
        await api.renew(worker, "goodbye")


async def test_a_worker_restarted_at_once_gets_its_sessions_and_ignores_the_late_final_report(
    api: Harness,
) -> None:
    worker = await api.worker("again", started_at=10.0)
    record = await api.place(await api.create("again"), worker)
    renewal = await api.renew(worker, "again", 0, WorkerPhase.STARTING, started_at=20.0)
    assert [row.id for row in renewal.assigned] == [record.id]
    assert (await listed(api, worker)).phase is WorkerPhase.STARTING
    with pytest.raises(WorkerGoneError):
        await api.renew(worker, "again", started_at=10.0)
    await api.renew(worker, "again", phase=WorkerPhase.GONE, started_at=10.0)
    assert (await listed(api, worker)).phase is WorkerPhase.STARTING
    await api.renew(worker, "again", started_at=20.0)
    assert (await listed(api, worker)).phase is WorkerPhase.READY


async def test_the_drain_of_a_process_whose_goodbye_was_lost_ends_with_it(api: Harness) -> None:
    """It restarts under its old id: the row says `draining`, and the next process serves."""
    worker = await api.worker("undrained", started_at=10.0)
    await api.bus.call(subjects.DRAIN_WORKER, DrainWorker(worker=worker))
    assert (await api.renew(worker, "undrained", phase=WorkerPhase.DRAINING, started_at=10.0)).drain
    renewal = await api.renew(worker, "undrained", 0, WorkerPhase.STARTING, started_at=20.0)
    assert not renewal.drain
    assert (await listed(api, worker)).phase is WorkerPhase.STARTING
    with pytest.raises(WorkerGoneError):
        await api.renew(worker, "undrained", phase=WorkerPhase.DRAINING, started_at=10.0)
    assert not (await api.renew(worker, "undrained", started_at=20.0)).drain
    assert (await listed(api, worker)).phase is WorkerPhase.READY
    assert (await api.place(await api.create("undrained"), worker)).worker == worker
    # Its own drain is final.
    await api.bus.call(subjects.DRAIN_WORKER, DrainWorker(worker=worker))
    assert (await api.renew(worker, "undrained", started_at=20.0)).drain
    assert (await listed(api, worker)).phase is WorkerPhase.DRAINING


@pytest.mark.real_servers
async def test_a_goodbye_that_waits_for_the_row_does_not_bury_the_next_process(
    start_store: Callable[..., Awaitable[Store]], settings: Settings
) -> None:
    """Both wait for the row's lock, the renewal of the next process first."""
    patient = settings.model_copy(update=PATIENT)
    await start_store(transaction_deadline_s=60.0)
    database = PostgresDatabase(patient)

    async def waiting() -> int:
        query = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
        async with database.statement() as db:
            here = text(f"{query} and datname = current_database()")
            return int((await db.connection.execute(here)).scalar_one())

    async with Harness.connected(patient) as api, asyncio.TaskGroup() as tasks:
        worker = await api.worker("buried", started_at=10.0)
        async with database.transaction() as db:
            await db.workers.get(worker, lock=True)
            tasks.create_task(api.renew(worker, "buried", 0, WorkerPhase.STARTING, started_at=20.0))
            await eventually(lambda: _equals(waiting, 1))
            tasks.create_task(api.renew(worker, "buried", phase=WorkerPhase.GONE, started_at=10.0))
            await eventually(lambda: _equals(waiting, 2))
    async with Harness.connected(patient) as api:
        assert (await listed(api, worker)).phase is WorkerPhase.STARTING
    await database.close()


async def _equals(count: Callable[[], Awaitable[int]], wanted: int) -> bool:
    return await count() == wanted


async def test_a_renewal_leaves_out_what_sleeps_elsewhere(api: Harness) -> None:
    """Incident: paused and abandoned sessions, if many, made the answer too large to be sent."""
    worker = await api.worker("asleep")
    record = await api.create("asleep", metadata={"note": "x" * 512})
    await api.place(record, worker)
    [assigned] = (await api.renew(worker, "asleep")).assigned
    assert (assigned.id, assigned.metadata) == (record.id, {})
    await api.pause(record.id)
    assert (await api.renew(worker, "asleep")).assigned == ()
    held = (HeldSession(session=record.id, epoch=1, next_chunk=0, resident=False),)
    assert [row.id for row in (await api.renew(worker, "asleep", held=held)).assigned] == [record.id]


async def test_the_renewal_lists_what_is_the_workers_and_nothing_that_has_ended(api: Harness) -> None:
    worker = await api.worker("rows")
    first, second = await api.create("rows"), await api.create("rows")
    await api.place(first, worker)
    placed = await api.place(second, worker)
    await api.end(first.id)
    held = (HeldSession(session=first.id, epoch=1, next_chunk=0),)
    renewal = await api.renew(worker, "rows", held=held)
    assert [(row.id, row.own_revision) for row in renewal.assigned] == [(second.id, placed.own_revision)]
    reassigned = await api.place(placed, await api.worker("rows"))
    assert (await api.renew(worker, "rows")).assigned == ()
    assert reassigned.epoch == 2


async def test_anything_at_once_leaves_rows_and_logs_that_agree(
    start_store: StartStore, settings: Settings
) -> None:
    """Two stores, many callers, no order: epochs rise by one, the fence agrees, no worker is overfull."""
    await start_store(**PATIENT)
    await start_store(**PATIENT)
    random_ = random.Random(5)
    async with Harness.connected(settings.model_copy(update=PATIENT)) as api:
        workers = [await api.worker("chaos", capacity=2) for _ in range(4)]
        records = [await api.create("chaos") for _ in range(8)]

        async def caller(seed: int) -> None:
            choose = random.Random(seed)
            for _ in range(12):
                session = choose.choice(records).id
                row = await api.get(session)
                calls = (
                    lambda: api.place(row, choose.choice(workers)),  # noqa: B023
                    lambda: api.place(row, choose.choice(workers)),  # noqa: B023
                    lambda: api.pause(session),  # noqa: B023
                    lambda: api.resume(session),  # noqa: B023
                    lambda: api.prompt(session, f"prompt {choose.random()}"),  # noqa: B023
                    lambda: api.renew(choose.choice(workers), "chaos", 2),
                )
                # Any error but these refusals ends the test.
                with suppress(ConflictError, TransitionError, NoCapacityError):
                    await choose.choice(calls)()

        await asyncio.gather(*(caller(random_.randrange(10**6)) for _ in range(8)))
        page = await api.bus.call(subjects.LIST_WORKERS, ListWorkers())
        found = [worker for worker in page.workers if worker.id in workers]
        assert len(found) == len(workers)
        assert all(worker.sessions <= worker.capacity for worker in found)
        for record in records:
            row = await api.get(record.id)
            owns = await api.history(subjects.OWN.of(record.id))
            epochs = [int(body.split(b'"epoch":')[1].split(b",")[0].split(b"}")[0]) for _, body in owns]
            assert epochs == sorted(set(epochs))
            if row.epoch:
                assert epochs[-1] == row.epoch
                assert owns[-1][0] == row.own_revision
            events = await api.events(record.id)
            versions = [event.record.version for event in events if event.type != "prompt.applied"]  # type: ignore[union-attr]
            assert versions == sorted(versions)
            assert len({event.id for event in events}) == len(events)

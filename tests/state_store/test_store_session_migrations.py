"""Migration of a session: guarantees of the store to the scheduler and both workers, on real servers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from nats.aio.msg import Msg
from sqlalchemy import text

from tests.helpers.waiting import eventually
from tests.state_store.conftest import StartStore
from tests.state_store.state_store_harness import PATIENT, Harness
from turboserve import subjects
from turboserve.contracts.chunks import Ownership
from turboserve.contracts.errors import (
    ConflictError,
    FencedError,
    InvalidInputError,
    MigrationOverError,
    NoCapacityError,
    SessionNotFoundError,
    StaleStateError,
    TransitionError,
    WorkerGoneError,
)
from turboserve.contracts.events import SessionMigrated, SessionMigrating, SessionMigrationAbandoned
from turboserve.contracts.requests import DrainWorker, ListSessions, ListWorkers
from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.contracts.workers import (
    Assignment,
    HeldSession,
    MigrationReport,
    MigrationStage,
    WorkerPhase,
    WorkerRecord,
)
from turboserve.ids import new_id
from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.settings import Settings

SERVERS = ("real", "memory")

ADDRESS = "tcp://127.0.0.1:4711?backend=gloo"
BEGUN = ("session.created", "session.placed", "session.migrating")


async def listed(api: Harness, worker: str) -> WorkerRecord:
    page = await api.bus.call(subjects.LIST_WORKERS, ListWorkers())
    return next(record for record in page.workers if record.id == worker)


async def overfull_now(api: Harness, model: str, capacity: int) -> list[str]:
    """Return workers with more slots used and reserved than they have, in one listing of all rows."""
    page = await api.bus.call(subjects.LIST_SESSIONS, ListSessions(limit=1_000))
    rows = [row for row in page.sessions if row.model == model and row.phase.holds_slot]
    slots = Counter(name for row in rows for name in (row.worker, row.target) if name is not None)
    return [worker for worker, used in slots.items() if used > capacity]


async def hear(api: Harness, worker: str) -> list[Assignment]:
    told: list[Assignment] = []

    async def take(message: Assignment, _: bytes) -> None:
        told.append(message)

    await api.bus.subscribe(subjects.ASSIGN, worker, take)
    await api.bus.flush()
    return told


async def migrating(api: Harness, model: str, capacity: int = 4) -> SessionRecord:
    """Create a session that migrates from one worker to another, both of its own."""
    source = await api.worker(model, capacity, transfer=(ADDRESS,), host="here")
    target = await api.worker(model, capacity)
    placed = await api.place(await api.create(model), source)
    return await api.begin_migration(placed, target)


async def test_a_migration_from_its_beginning_to_its_commit(api: Harness) -> None:
    source = await api.worker("migrations", transfer=(ADDRESS,), host="here")
    target = await api.worker("migrations")
    at_source, at_target = await hear(api, source), await hear(api, target)
    placed = await api.place(await api.create("migrations"), source)
    await api.chunk(placed, 0)
    begun = await api.begin_migration(placed, target)
    assert (begun.phase, begun.worker, begun.target) == (Phase.MIGRATING, source, target)
    assert (begun.epoch, begun.own_revision, begun.migration) == (1, placed.own_revision, begun.version)

    # Both are informed at once, and with every renewal; the target also learns the source's address.
    await eventually(lambda: at_target)
    assert at_target[0].incoming is not None
    assert (at_target[0].incoming.record.migration, at_target[0].incoming.source) == (
        begun.migration,
        (ADDRESS,),
    )
    await eventually(lambda: at_source and at_source[-1].record.target == target)
    assert at_source[-1].incoming is None
    renewal = await api.renew(target, "migrations")
    [incoming] = renewal.incoming
    assert (incoming.record.id, incoming.source, renewal.assigned) == (begun.id, (ADDRESS,), ())
    [assigned] = (await api.renew(source, "migrations", transfer=(ADDRESS,), host="here")).assigned
    assert (assigned.target, assigned.migration) == (target, begun.migration)
    counted = [await listed(api, worker) for worker in (source, target)]
    assert [(one.sessions, one.incoming) for one in counted] == [(1, 0), (0, 1)]
    assert (counted[0].transfer, counted[0].host) == ((ADDRESS,), "here")

    # The source still generates.
    await api.chunk(begun, 1)
    await api.prompt(begun.id, "while it migrates")
    done = await api.commit_migration(begun, next_chunk=2)
    assert (done.phase, done.worker, done.target, done.migration) == (Phase.ACTIVE, target, None, None)
    assert (done.epoch, done.state_digest, done.control_seq) == (2, "d1", 1)
    owns = [(number, Ownership.from_bytes(body)) for number, body in await _owns(api, done)]
    assert [(own.epoch, own.worker) for _, own in owns] == [(1, source), (2, target)]
    assert done.own_revision == owns[-1][0]
    with pytest.raises(FencedError):
        await api.chunk(begun, 2)
    await api.chunk(done, 2)
    await eventually(lambda: at_target[-1].record.worker == target and at_target[-1].incoming is None)
    await eventually(lambda: at_source[-1].record.worker == target)
    renewal = await api.renew(target, "migrations")
    assert ([row.id for row in renewal.assigned], renewal.incoming) == ([done.id], ())
    assert (await api.renew(source, "migrations")).assigned == ()

    events = await api.until_events(done.id, *BEGUN, "prompt.accepted", "session.migrated")
    assert isinstance(events[2], SessionMigrating)
    assert (events[2].reason, events[2].record.target) == ("less loaded", target)
    assert isinstance(events[4], SessionMigrated)
    assert (events[4].previous_worker, events[4].record.worker) == (source, target)
    decisions = await api.decisions(done.id)
    assert [(one.kind, one.epoch, one.worker) for one in decisions] == [
        ("place", 1, source),
        ("migrate", 1, target),
        ("migrated", 2, target),
    ]
    assert decisions[2].numbers["bytes_copied"] == 5.0


async def _owns(api: Harness, record: SessionRecord) -> list[tuple[int, bytes]]:
    return await api.history(subjects.OWN.of(record.id))


async def test_a_migration_that_is_given_up_leaves_everything_as_it_was(api: Harness) -> None:
    begun = await migrating(api, "given-up")
    at_target = await hear(api, str(begun.target))
    stays = await api.abandon_migration(begun)
    assert (stays.phase, stays.worker, stays.target, stays.migration) == (
        Phase.ACTIVE,
        begun.worker,
        None,
        None,
    )
    assert (stays.epoch, stays.own_revision) == (begun.epoch, begun.own_revision)
    await eventually(lambda: at_target)
    assert (at_target[-1].record.version, at_target[-1].incoming) == (stays.version, None)
    assert (await api.renew(str(begun.target), "given-up")).incoming == ()
    await api.chunk(stays, 0)
    events = await api.until_events(begun.id, *BEGUN, "session.migration_abandoned")
    assert isinstance(events[3], SessionMigrationAbandoned)
    assert (events[3].target, events[3].reason) == (begun.target, "took too long")
    last = (await api.decisions(begun.id))[-1]
    assert (last.kind, last.worker) == ("stay", begun.worker)
    assert "took too long" in last.reason


async def test_every_step_may_be_asked_for_again(api: Harness) -> None:
    placed = await api.running("again")
    target = await api.worker("again")
    begun = await api.begin_migration(placed, target)
    await api.prompt(begun.id, "in between")
    same = await api.begin_migration(placed, target)
    assert (same.migration, same.version) == (begun.migration, begun.version + 1)
    done = await api.commit_migration(begun)
    again = await api.commit_migration(begun)
    assert (again.version, again.epoch, again.own_revision) == (done.version, 2, done.own_revision)
    # After a lost answer, a request to abandon the migration may come too late.
    assert (await api.abandon_migration(begun)).version == done.version
    with pytest.raises(ConflictError):
        await api.begin_migration(placed, target)
    # Back again: reports of the first migration do not apply to the second.
    back = await api.begin_migration(done, str(placed.worker))
    assert (await api.commit_migration(begun)).migration == back.migration
    assert (await api.abandon_migration(begun)).migration == back.migration
    await api.commit_migration(back)
    with pytest.raises(MigrationOverError):
        await api.commit_migration(begun)
    assert [Ownership.from_bytes(body).epoch for _, body in await _owns(api, done)] == [1, 2, 3]
    await api.until_events(
        begun.id,
        *(*BEGUN, "prompt.accepted", "session.migrated", "session.migrating", "session.migrated"),
    )


async def test_of_commit_and_abandon_at_once_one_happens(api: Harness) -> None:
    for _ in range(6):
        begun = await migrating(api, "race", capacity=1)
        committed, abandoned = await asyncio.gather(
            api.commit_migration(begun), api.abandon_migration(begun), return_exceptions=True
        )
        row = await api.get(begun.id)
        assert isinstance(abandoned, SessionRecord)
        if isinstance(committed, SessionRecord):
            assert (row.epoch, row.worker, abandoned.worker) == (2, begun.target, begun.target)
        else:
            assert isinstance(committed, MigrationOverError)
            assert (row.epoch, row.worker) == (1, begun.worker)
        assert (row.phase, row.target) == (Phase.ACTIVE, None)
        assert len(await _owns(api, row)) == row.epoch
        await api.end(row.id)


@pytest.mark.parametrize("how", ["pause", "end", "place"])
async def test_what_overtakes_a_migration_ends_it(api: Harness, how: str) -> None:
    model = f"overtaken-{how}"
    begun = await migrating(api, model)
    at_target = await hear(api, str(begun.target))
    other = await api.worker(model)
    calls: dict[str, Callable[[], Awaitable[SessionRecord]]] = {
        "pause": lambda: api.pause(begun.id),
        "end": lambda: api.end(begun.id),
        "place": lambda: api.place(begun, other, kind="recover"),
    }
    after = await calls[how]()
    assert (after.target, after.migration) == (None, None)
    # The target, which the row no longer names, is informed of it.
    await eventually(lambda: any(one.record.version == after.version for one in at_target))
    with pytest.raises(MigrationOverError):
        await api.commit_migration(begun)
    assert (await api.abandon_migration(begun)).version == after.version
    assert (await api.renew(str(begun.target), model)).incoming == ()
    assert (await listed(api, str(begun.target))).incoming == 0


async def test_a_suspended_session_migrates_with_its_state_and_stays_suspended(api: Harness) -> None:
    placed = await api.running("asleep")
    full = await api.worker("asleep", capacity=1)
    await api.place(await api.create("asleep"), full)
    paused = await api.pause(placed.id)
    begun = await api.begin_migration(paused, full)
    assert (begun.phase, begun.activity, begun.target) == (Phase.SUSPENDED, Activity.PAUSED, full)
    with pytest.raises(TransitionError):
        await api.begin_migration(begun, await api.worker("asleep"))
    done = await api.commit_migration(begun)
    assert (done.phase, done.worker, done.epoch) == (Phase.SUSPENDED, full, 2)
    # The target asks before it has learned of the commit: its copy must not count as left over.
    reports = (
        MigrationReport(session=done.id, migration=begun.migration or 0, stage=MigrationStage.VERIFIED),
    )
    renewal = await api.renew(full, "asleep", 1, migrations=reports)
    assert done.id in {row.id for row in renewal.assigned}
    held = (HeldSession(session=done.id, epoch=1, next_chunk=0, resident=False),)
    assert (await api.renew(str(placed.worker), "asleep", held=held)).assigned == ()


async def test_a_source_without_the_state_hears_of_the_migration_and_is_released(api: Harness) -> None:
    """Incident: its worker was never informed, always answered "not known", and never left the pool."""
    placed = await api.running("empty")
    source, target = str(placed.worker), await api.worker("empty")
    paused = await api.pause(placed.id)
    assert (await api.renew(source, "empty")).assigned == ()
    begun = await api.begin_migration(paused, target)
    assert [row.id for row in (await api.renew(source, "empty")).assigned] == [placed.id]
    released = await api.abandon_migration(begun, "no_state: not here", release=True)
    assert (released.phase, released.worker, released.epoch) == (Phase.SUSPENDED, None, begun.epoch + 1)
    assert (await api.abandon_migration(begun, release=True)).version == released.version
    assert (await listed(api, source)).suspended == 0
    assert "release" in {decision.kind for decision in await api.decisions(placed.id)}
    # The fence follows: the old owner cannot append any more.
    with pytest.raises(FencedError):
        await api.chunk(placed, 0)
    back = await api.place(await api.resume(placed.id), target)
    assert (back.worker, back.epoch) == (target, released.epoch + 1)


async def test_a_place_that_is_being_migrated_to_is_taken(api: Harness) -> None:
    first, second = await api.running("slots", capacity=1), await api.running("slots", capacity=1)
    free = await api.worker("slots", capacity=1)
    begun = await api.begin_migration(first, free)
    with pytest.raises(NoCapacityError) as caught:
        await api.begin_migration(second, free)
    assert (caught.value.field, caught.value.limit) == ("worker", 1)
    third = await api.resume((await api.pause(second.id)).id)
    with pytest.raises(NoCapacityError):
        await api.place(third, free)
    await api.abandon_migration(begun)
    assert (await api.place(third, free)).worker == free


async def test_a_migration_cannot_begin_where_it_could_not_end(api: Harness) -> None:
    placed = await api.running("refused")
    starting = await api.worker("refused", phase=WorkerPhase.STARTING)
    draining = await api.worker("refused")
    await api.bus.call(subjects.DRAIN_WORKER, DrainWorker(worker=draining))
    gone = await api.worker("refused")
    await api.gone(gone)
    elsewhere = await api.worker("refused-elsewhere")
    for target, error in (
        (str(placed.worker), InvalidInputError),
        (elsewhere, InvalidInputError),
        (starting, NoCapacityError),
        (draining, NoCapacityError),
        (gone, WorkerGoneError),
        ("wk_never", WorkerGoneError),
    ):
        with pytest.raises(error):
            await api.begin_migration(placed, target)
    with pytest.raises(SessionNotFoundError):
        await api.begin_migration(placed.model_copy(update={"id": "ses_never"}), starting)
    waiting = await api.create("refused")
    with pytest.raises(TransitionError):
        await api.begin_migration(waiting, str(placed.worker))
    assert (await api.get(placed.id)).version == placed.version


async def test_a_state_that_the_log_has_left_behind_is_not_committed(api: Harness) -> None:
    begun = await migrating(api, "behind")
    for index in range(3):
        await api.chunk(begun, index)

    async def counted() -> bool:
        return (await api.get(begun.id)).next_chunk == 3

    await eventually(counted)
    with pytest.raises(StaleStateError):
        await api.commit_migration(begun, next_chunk=2)
    assert (await api.get(begun.id)).migration == begun.migration
    assert (await api.commit_migration(begun, next_chunk=3)).worker == begun.target


async def test_the_death_of_a_target_ends_the_migrations_to_it(api: Harness) -> None:
    begun = await migrating(api, "dead-target")
    paused = await api.pause((await api.running("dead-target")).id)
    suspended_row = await api.begin_migration(paused, str(begun.target))
    await api.gone(str(begun.target))
    for before, phase in ((begun, Phase.ACTIVE), (suspended_row, Phase.SUSPENDED)):
        row = await api.get(before.id)
        assert (row.phase, row.worker, row.target, row.epoch) == (phase, before.worker, None, 1)
        with pytest.raises(MigrationOverError):
            await api.commit_migration(before)
        assert "is gone" in (await api.decisions(before.id))[-1].reason
    await api.until_events(begun.id, *BEGUN, "session.migration_abandoned")


async def test_the_death_of_a_source_leaves_its_migration_to_the_scheduler(api: Harness) -> None:
    finished, lost = await migrating(api, "dead-source"), await migrating(api, "dead-source")
    for begun in (finished, lost):
        await api.gone(str(begun.worker))
        assert (await api.get(begun.id)).migration == begun.migration
        [incoming] = (await api.renew(str(begun.target), "dead-source")).incoming
        assert incoming.record.id == begun.id
    # Its state was complete before its source died.
    assert (await api.commit_migration(finished)).worker == finished.target
    recovered = await api.place(await api.get(lost.id), str(finished.target), kind="recover")
    assert (recovered.phase, recovered.worker, recovered.target) == (Phase.ACTIVE, finished.target, None)


async def test_a_commit_never_gives_a_session_to_a_worker_that_is_gone(api: Harness) -> None:
    for _ in range(6):
        begun = await migrating(api, "gone-race")
        committed, _ = await asyncio.gather(
            api.commit_migration(begun), api.gone(str(begun.target)), return_exceptions=True
        )
        row = await api.get(begun.id)
        if isinstance(committed, SessionRecord):
            # First committed, then gone: the scheduler recovers it like any session of a dead worker.
            assert (row.epoch, row.worker) == (2, begun.target)
        else:
            assert isinstance(committed, MigrationOverError | WorkerGoneError)
            assert (row.phase, row.worker, row.target, row.epoch) == (Phase.ACTIVE, begun.worker, None, 1)


async def test_migrations_among_everything_else_leave_rows_and_logs_that_agree(
    start_store: StartStore, settings: Settings
) -> None:
    """Two stores, many callers, no order: no worker is overfull at any time, epochs rise by one."""
    await start_store(**PATIENT)
    await start_store(**PATIENT)
    overfull: list[str] = []
    async with Harness.connected(settings.model_copy(update=PATIENT)) as api:
        workers = [await api.worker("chaos-migrations", capacity=2) for _ in range(5)]
        records = [await api.create("chaos-migrations") for _ in range(7)]

        async def caller(seed: int) -> None:
            choose = random.Random(seed)
            for _ in range(14):
                row = await api.get(choose.choice(records).id)
                calls = (
                    lambda: api.place(row, choose.choice(workers)),  # noqa: B023
                    lambda: api.begin_migration(row, choose.choice(workers)),  # noqa: B023
                    lambda: api.begin_migration(row, choose.choice(workers)),  # noqa: B023
                    lambda: (
                        api.commit_migration(row)  # noqa: B023
                        if row.migration  # noqa: B023
                        else api.place(row, choose.choice(workers))  # noqa: B023
                    ),
                    lambda: api.abandon_migration(row),  # noqa: B023
                    lambda: api.pause(row.id),  # noqa: B023
                    lambda: api.resume(row.id),  # noqa: B023
                    lambda: api.prompt(row.id, f"prompt {choose.random()}"),  # noqa: B023
                    lambda: api.renew(choose.choice(workers), "chaos-migrations", 2),
                )
                with suppress(ConflictError, TransitionError, NoCapacityError, InvalidInputError):
                    await choose.choice(calls)()
                overfull.extend(await overfull_now(api, "chaos-migrations", capacity=2))

        await asyncio.gather(*(caller(seed) for seed in range(6)))
        assert overfull == []
        for record in records:
            row = await api.get(record.id)
            owns = [Ownership.from_bytes(body) for _, body in await _owns(api, row)]
            epochs = [own.epoch for own in owns]
            assert epochs == sorted(set(epochs))
            if row.epoch:
                assert (epochs[-1], owns[-1].worker) == (row.epoch, row.worker)
            events = await api.events(record.id)
            versions = [event.record.version for event in events if event.type != "prompt.applied"]  # type: ignore[union-attr]
            assert versions == sorted(versions)


async def key_in_row(settings: Settings, session: str) -> str | None:
    database = PostgresDatabase(settings)
    try:
        async with database.transaction() as db:
            query = text("select migration_key from sessions where id = :id")
            found: str | None = (await db.connection.execute(query, {"id": session})).scalar_one()
            return found
    finally:
        await database.close()


@pytest.mark.real_servers
async def test_only_the_two_workers_of_a_migration_get_its_key(api: Harness, settings: Settings) -> None:
    source, target, stranger = [await api.worker("keys") for _ in range(3)]
    at_source, at_target, at_stranger = [await hear(api, worker) for worker in (source, target, stranger)]
    everything: list[bytes] = []

    async def overhear(message: Msg) -> None:
        if not message.subject.startswith(("assign.", "_INBOX")):
            everything.append(message.data)

    await api.bus.client.subscribe(">", cb=overhear)
    placed = await api.place(await api.create("keys"), source)
    assert await key_in_row(settings, placed.id) is None
    assert (await api.renew(source, "keys")).keys == ()
    begun = await api.begin_migration(placed, target)
    key = await key_in_row(settings, begun.id)
    assert key is not None
    assert len(bytes.fromhex(key)) == 32

    # At once, and with every renewal.
    await eventually(lambda: at_target and at_target[-1].key and at_source and at_source[-1].key)
    renewals = [await api.renew(worker, "keys") for worker in (source, target)]
    for told in (at_source[-1].key, at_target[-1].key, *(renewal.keys[0] for renewal in renewals)):
        assert told is not None
        assert (told.session, told.migration, told.key.get_secret_value()) == (begun.id, begun.migration, key)
    assert (await api.renew(stranger, "keys")).keys == ()
    assert at_stranger == []

    # Other changes of the row keep the key; a repeated request makes no other.
    await api.prompt(begun.id, "while it migrates")
    assert (await api.begin_migration(placed, target)).migration == begun.migration
    assert await key_in_row(settings, begun.id) == key

    # No other caller learns it: not by an answer, not by an event, not by a printed form.
    answers = [begun, await api.get(begun.id), renewals[0], at_source[-1]]
    assert not any(key in repr(answer) for answer in answers)
    page = await api.bus.call(subjects.LIST_SESSIONS, ListSessions(limit=1_000))
    assert key.encode() not in page.to_bytes()
    assert key.encode() not in (await api.get(begun.id)).to_bytes()
    done = await api.commit_migration(begun)
    await api.until_events(done.id, *BEGUN, "prompt.accepted", "session.migrated")
    assert everything
    assert not any(key.encode() in data for data in everything)

    # It ends with the migration, and the next one has its own.
    assert await key_in_row(settings, begun.id) is None
    assert [(await api.renew(worker, "keys")).keys for worker in (source, target)] == [(), ()]
    again = await api.begin_migration(done, source)
    assert await key_in_row(settings, again.id) not in (None, key)


@pytest.mark.parametrize("end", ["abandon", "pause", "end"])
@pytest.mark.real_servers
async def test_a_migration_that_ends_takes_its_key_along(api: Harness, settings: Settings, end: str) -> None:
    begun = await migrating(api, new_id("m"))
    assert await key_in_row(settings, begun.id) is not None
    await {"abandon": lambda: api.abandon_migration(begun), "pause": lambda: api.pause(begun.id)}.get(
        end, lambda: api.end(begun.id)
    )()
    assert await key_in_row(settings, begun.id) is None

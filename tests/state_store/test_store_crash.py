"""kill -9 of the state store after a commit, before its effects: nothing lost, doubled or out of order."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.helpers.waiting import eventually
from tests.state_store.state_store_harness import Harness, Process, Store
from turboserve import subjects
from turboserve.contracts.chunks import Ownership
from turboserve.contracts.errors import FencedError
from turboserve.contracts.events import PromptApplied, event_from_bytes
from turboserve.contracts.sessions import SessionRecord
from turboserve.ids import new_id
from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.settings import Settings
from turboserve.tasks import stop


async def all_is_published(settings: Settings) -> None:
    """Wait until the running store has published its outbox: the next store would begin with the rest."""
    database = PostgresDatabase(settings)

    async def nothing_left() -> bool:
        async with database.statement() as db:
            return await db.outbox.backlog() == (0, None)

    try:
        await eventually(nothing_left)
    finally:
        await database.close()


async def counted(api: Harness, session: str, next_chunk: int) -> None:
    """Wait until a running store has counted so many chunks, and with them all earlier entries of the log."""

    async def done() -> bool:
        return (await api.get(session)).next_chunk == next_chunk

    await eventually(done)


async def test_a_session_that_was_committed_is_announced(settings: Settings) -> None:
    session = new_id("ses")
    async with Harness.connected(settings) as api:
        async with Process.running(settings, "created, nothing published") as process:
            await api.worker("created")
            await process.dies_of(api.bus, api.create("created", id=session))
        assert await api.history(subjects.EVENT.of(session)) == []
        async with Store.running(settings):
            await api.until_events(session, "session.created")
            assert (await api.create("created", id=session)).version == 1
            await api.until_events(session, "session.created")


@pytest.mark.parametrize(
    "point",
    [
        "placed, nothing published",
        "placed, fence not begun",
        "own in the log, nobody told",
        "own in the log, revision not stored",
        "own in the log, revision not committed",
    ],
)
async def test_a_change_of_owner_reaches_the_fence_exactly_once(settings: Settings, point: str) -> None:
    model = point.replace(" ", "-").replace(",", "")
    async with Harness.connected(settings) as api:
        async with Store.running(settings):
            first, second = await api.worker(model), await api.worker(model)
            before = await api.place(await api.create(model), first)
            await api.chunk(before, 0)
            await api.until_events(before.id, "session.created", "session.placed")
        async with Process.running(settings, point) as process:
            await process.dies_of(api.bus, api.place(before, second))
        async with Store.running(settings):

            async def fenced() -> bool:
                return (await api.get(before.id)).own_revision is not None

            await eventually(fenced)
            row = await api.get(before.id)
            assert (row.epoch, row.worker) == (2, second)
            owns = await api.history(subjects.OWN.of(before.id))
            assert [Ownership.from_bytes(body).epoch for _, body in owns] == [1, 2]
            assert row.own_revision == owns[-1][0]
            # The scheduler repeats its request and learns that it took effect. The old owner is fenced.
            assert (await api.place(before, second)).epoch == 2
            with pytest.raises(FencedError):
                await api.chunk(before, 1)
            await api.chunk(row, 1)
            await api.until_events(before.id, "session.created", "session.placed", "session.placed")
            [assigned] = (await api.renew(second, model)).assigned
            assert assigned.own_revision == row.own_revision
            assert (await api.renew(first, model)).assigned == ()


async def migrating(api: Harness, model: str) -> SessionRecord:
    source, target = await api.worker(model), await api.worker(model)
    placed = await api.place(await api.create(model), source)
    await api.chunk(placed, 0)
    return await api.begin_migration(placed, target)


@pytest.mark.parametrize("step", ["begin", "abandon"])
async def test_a_step_of_a_migration_that_was_committed_reaches_both_workers(
    settings: Settings, step: str
) -> None:
    model = f"{step}-and-die"
    async with Harness.connected(settings) as api:
        async with Store.running(settings):
            begun = await migrating(api, model)
            before = await api.abandon_migration(begun)
            target = str(begun.target)
            if step == "abandon":
                begun = await api.begin_migration(before, target)
        async with Process.running(settings, "created, nothing published") as process:
            request = api.begin_migration(before, target) if step == "begin" else api.abandon_migration(begun)
            await process.dies_of(api.bus, request)
        async with Store.running(settings):
            await eventually(api.answered)
            row = await api.get(begun.id)
            incoming = (await api.renew(target, model)).incoming
            [assigned] = (await api.renew(str(row.worker), model)).assigned
            assert (assigned.target, assigned.migration) == (row.target, row.migration)
            if step == "begin":
                assert [one.record.id for one in incoming] == [row.id]
                # The scheduler repeats its request and learns that it took effect.
                assert (await api.begin_migration(before, target)).version == row.version
            else:
                assert (row.target, incoming) == (None, ())
                assert (await api.abandon_migration(begun)).version == row.version
            first = ("session.created", "session.placed", "session.migrating", "session.migration_abandoned")
            last = ("session.migration_abandoned",) if step == "abandon" else ()
            await api.until_events(row.id, *first, "session.migrating", *last)


@pytest.mark.parametrize(
    "point",
    [
        "placed, nothing published",
        "placed, fence not begun",
        "own in the log, nobody told",
        "own in the log, revision not stored",
        "own in the log, revision not committed",
    ],
)
async def test_a_migration_that_was_committed_reaches_the_fence_exactly_once(
    settings: Settings, point: str
) -> None:
    model = "migrated-" + point.replace(" ", "-").replace(",", "")
    async with Harness.connected(settings) as api:
        async with Store.running(settings):
            begun = await migrating(api, model)
        async with Process.running(settings, point) as process:
            await process.dies_of(api.bus, api.commit_migration(begun, next_chunk=1))
        async with Store.running(settings):

            async def fenced() -> bool:
                return (await api.get(begun.id)).own_revision is not None

            await eventually(fenced)
            row = await api.get(begun.id)
            assert (row.epoch, row.worker, row.target) == (2, begun.target, None)
            owns = await api.history(subjects.OWN.of(row.id))
            assert [Ownership.from_bytes(body).epoch for _, body in owns] == [1, 2]
            assert row.own_revision == owns[-1][0]
            assert (await api.commit_migration(begun, next_chunk=1)).version == row.version
            # A request to abandon the migration now learns that it is committed.
            assert (await api.abandon_migration(begun)).worker == begun.target
            with pytest.raises(FencedError):
                await api.chunk(begun, 1)
            await api.chunk(row, 1)
            [assigned] = (await api.renew(str(begun.target), model)).assigned
            assert assigned.own_revision == row.own_revision
            assert (await api.renew(str(begun.worker), model)).assigned == ()
            types = ("session.created", "session.placed", "session.migrating", "session.migrated")
            await api.until_events(row.id, *types)


@pytest.mark.parametrize("point", ["event in the log, not removed", "event removed, lock not given up"])
async def test_an_event_that_was_published_is_not_published_again(settings: Settings, point: str) -> None:
    model = point.replace(" ", "-").replace(",", "")
    worker = new_id("wk")
    async with Harness.connected(settings) as api:
        async with Store.running(settings):
            await all_is_published(settings)
        async with Process.running(settings, point) as process:
            # It may be answered before the event is published, or not at all.
            renewal = asyncio.create_task(api.renew(worker, model))
            assert await process.died() == -signal.SIGKILL
            await stop(renewal)
        async with Store.running(settings):
            await api.gone(worker)

            async def types_so_far() -> list[str]:
                history = await api.history(subjects.WORKER_EVENT.of(worker))
                return [event_from_bytes(body).type for _, body in history]

            async def left() -> bool:
                return "worker.left" in await types_so_far()

            await eventually(left)
            assert await types_so_far() == ["worker.joined", "worker.left"]


@pytest.mark.parametrize("point", ["chunk counted, not committed", "prompt applied, not committed"])
async def test_a_prompt_is_applied_once_and_by_its_first_chunk(settings: Settings, point: str) -> None:
    model = point.replace(" ", "-").replace(",", "")
    async with Harness.connected(settings) as api:
        async with Store.running(settings):
            record = await api.running(model)
            await api.prompt(record.id, "switch")
            # The next store dies at the first thing that it counts.
            await api.chunk(record, 0)
            await counted(api, record.id, 1)
        async with Process.running(settings, point) as process:
            await api.chunk(record, 1)
            await api.chunk(record, 2, control_seq=1)
            assert await process.died() == -signal.SIGKILL
        # The next chunk is in the log before a store counts again.
        await api.chunk(record, 3, control_seq=1)
        async with Store.running(settings):
            events = await api.until_events(
                record.id, "session.created", "session.placed", "prompt.accepted", "prompt.applied"
            )
            assert isinstance(events[3], PromptApplied)
            assert events[3].chunk_index == 2
            await counted(api, record.id, 4)
            assert (await api.get(record.id)).applied_control_seq == 1

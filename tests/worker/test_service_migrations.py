"""Live migration between worker processes, with a real broker and store. The test plays the scheduler."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.worker.worker_scene import Chunk, Scene, environment, pool, scene, store
from turboserve.contracts.errors import MigrationOverError, NoCapacityError
from turboserve.contracts.requests import (
    AbandonMigration,
    BeginMigration,
    CommitMigration,
    SessionRef,
    SubmitPrompt,
)
from turboserve.contracts.sessions import Decision, Phase, SessionRecord
from turboserve.contracts.workers import MigrationReport, MigrationStage, Playhead
from turboserve.ids import new_id
from turboserve.subjects import (
    ABANDON_MIGRATION,
    BEGIN_MIGRATION,
    COMMIT_MIGRATION,
    PAUSE_SESSION,
    PLAYHEAD,
    RESUME_SESSION,
    SUBMIT_PROMPT,
)

__all__ = ["environment", "pool", "scene", "store"]

# The first test waits until torch, Postgres and the state store have started.
pytestmark = pytest.mark.timeout(900)

SLAB_BYTES = "turboserve_worker_kv_bytes"
HOST_BYTES = "turboserve_worker_host_memory_bytes"
BROKEN = "turboserve_worker_transfers_broken_total"
BACKENDS = [("gloo",), ("shm",)]


async def begin(scene: Scene, session: str, target: str) -> SessionRecord:
    record = await scene.record(session)
    decision = Decision(session=session, epoch=record.epoch, worker=target, kind="migrate", reason="test")
    return await scene.ask(
        BEGIN_MIGRATION,
        BeginMigration(session=session, expected_version=record.version, target=target, decision=decision),
    )


async def reported(scene: Scene, row: SessionRecord, *stages: MigrationStage) -> MigrationReport:
    """Wait until the target reports one of `stages`; the video plays on meanwhile. Returns the report."""
    found: list[MigrationReport] = []
    assert row.target is not None
    target = row.target

    async def said() -> bool:
        await play_on(scene, row.id)
        load = scene.loads[target]
        found[:] = [one for one in load.migrations if (one.session, one.migration) == (row.id, row.migration)]
        return bool(found) and found[0].stage in stages

    await scene.until(said, f"{row.id} is {stages}")
    return found[0]


async def play_on(scene: Scene, session: str) -> None:
    """Report a viewer two seconds behind the log's end."""
    record = await scene.record(session)
    at = max(0.0, 0.75 * record.next_chunk - 2.0)
    await scene.bus.publish(PLAYHEAD, session, Playhead(session=session, playhead_s=at, viewers=1))


async def commit(scene: Scene, row: SessionRecord, report: MigrationReport) -> SessionRecord:
    assert row.target is not None
    assert row.migration is not None
    return await scene.ask(
        COMMIT_MIGRATION,
        CommitMigration(
            session=row.id,
            migration=row.migration,
            target=row.target,
            next_chunk=report.next_chunk,
            digest=report.digest,
        ),
    )


async def abandon(scene: Scene, row: SessionRecord) -> SessionRecord:
    assert row.migration is not None
    return await scene.ask(
        ABANDON_MIGRATION, AbandonMigration(session=row.id, migration=row.migration, reason="test")
    )


async def migrated(scene: Scene, session: str, target: str) -> MigrationReport:
    row = await begin(scene, session, target)
    report = await reported(scene, row, MigrationStage.VERIFIED)
    await commit(scene, row, report)
    return report


async def empty(scene: Scene, worker: str) -> None:
    def nothing() -> bool:
        return scene.metric(worker, SLAB_BYTES) == scene.metric(worker, HOST_BYTES) == 0

    await scene.until(nothing, f"{worker} holds nothing")


def video(chunks: list[Chunk]) -> list[bytes]:
    return [chunk.data for chunk in chunks]


async def not_migrated(scene: Scene, worker: str, seed: int, count: int) -> list[bytes]:
    """Return the video of this seed's session without a migration."""
    return video(await scene.chunks(await scene.started(worker, seed=seed), count))


@pytest.mark.parametrize("backends", BACKENDS, ids=lambda names: names[0])
async def test_a_migrated_session_goes_on_bit_for_bit_and_the_source_lets_go(
    scene: Scene, backends: tuple[str, ...]
) -> None:
    chosen = {"TURBOSERVE_TRANSFER_BACKENDS": f'["{backends[0]}"]'}
    source, target = [await scene.worker(**chosen) for _ in range(2)]
    wanted = await not_migrated(scene, target, seed=3, count=14)
    session = await scene.started(source, seed=3)
    await scene.chunks(session, 5)
    report = await migrated(scene, session, target)
    assert report.digest is not None
    assert report.bytes_copied > 0
    chunks = await scene.chunks(session, 14)
    assert video(chunks) == wanted
    makers = [chunk.header.worker for chunk in chunks]
    assert makers == [source] * report.next_chunk + [target] * (14 - report.next_chunk)
    assert [chunk.header.epoch for chunk in chunks] == [1 + (maker == target) for maker in makers]
    assert (await scene.record(session)).state_digest == report.digest
    await empty(scene, source)
    # And back again, over warm links.
    again = await migrated(scene, session, source)
    assert (await scene.chunks(session, again.next_chunk + 2))[-1].header.worker == source


async def test_an_abandoned_migration_leaves_the_session_where_it_is(scene: Scene) -> None:
    source, target = await scene.worker(), await scene.worker()
    wanted = await not_migrated(scene, source, seed=4, count=12)
    session = await scene.started(source, seed=4)
    await scene.chunks(session, 3)
    row = await begin(scene, session, target)
    await reported(scene, row, MigrationStage.VERIFIED)
    # It is quiesced for the end of the copy, and resumes once the row changes.
    await abandon(scene, row)
    chunks = await scene.chunks(session, 12)
    assert video(chunks) == wanted
    assert {chunk.header.worker for chunk in chunks} == {source}
    await empty(scene, target)


async def test_a_migration_that_is_abandoned_at_once_frees_both_sides(scene: Scene) -> None:
    source, target = await scene.worker(), await scene.worker()
    session = await scene.started(source)
    for _ in range(4):
        await scene.chunks(session, 2)
        await abandon(scene, await begin(scene, session, target))
    await empty(scene, target)
    await scene.chunks(session, 8)


async def test_a_prompt_during_a_migration_is_applied_by_the_next_owner(scene: Scene) -> None:
    source, target = await scene.worker(), await scene.worker()
    session = await scene.started(source)
    await scene.chunks(session, 3)
    row = await begin(scene, session, target)
    report = await reported(scene, row, MigrationStage.VERIFIED)
    prompt = SubmitPrompt(session=session, prompt_id=new_id("prm"), prompt="a blue square")
    receipt = await scene.ask(SUBMIT_PROMPT, prompt)
    await commit(scene, row, report)
    chunks = await scene.chunks(session, report.next_chunk)
    assert chunks[-1].header.control_seq < receipt.control_seq

    async def applied() -> bool:
        chunks[:] = await scene.chunks(session, len(chunks) + 1)
        return chunks[-1].header.control_seq == receipt.control_seq

    await scene.until(applied, "a chunk is made under the prompt")
    assert chunks[-1].header.worker == target


async def test_a_pause_during_a_migration_suspends_the_session_at_its_source(scene: Scene) -> None:
    source, target = await scene.worker(), await scene.worker()
    session = await scene.started(source)
    await scene.chunks(session, 3)
    row = await begin(scene, session, target)
    report = await reported(scene, row, MigrationStage.VERIFIED)
    await scene.ask(PAUSE_SESSION, SessionRef(session=session))
    with pytest.raises(MigrationOverError):
        await commit(scene, row, report)
    await scene.until(lambda: scene.metric(source, HOST_BYTES) > 0, "its state is on the host")
    await empty(scene, target)


async def test_a_suspended_session_migrates_from_host_to_host(scene: Scene) -> None:
    source, target = await scene.worker(), await scene.worker()
    wanted = await not_migrated(scene, target, seed=5, count=12)
    session = await scene.started(source, seed=5)
    await scene.chunks(session, 4)
    await scene.ask(PAUSE_SESSION, SessionRef(session=session))
    await scene.until(lambda: scene.metric(source, HOST_BYTES) > 0, "its state is on the host")
    row = await begin(scene, session, target)
    assert row.phase is Phase.SUSPENDED
    await commit(scene, row, await reported(scene, row, MigrationStage.VERIFIED))
    await empty(scene, source)
    assert scene.metric(target, HOST_BYTES) > 0
    await scene.ask(RESUME_SESSION, SessionRef(session=session))
    await scene.place(session, target, "resume")
    chunks = await scene.chunks(session, 12)
    assert video(chunks) == wanted
    assert chunks[-1].header.worker == target


async def test_a_host_without_room_refuses_a_suspended_session_which_stays_where_it_is(scene: Scene) -> None:
    source, target = await scene.worker(), await scene.worker(TURBOSERVE_HOST_MEMORY_BYTES="1024")
    session = await scene.started(source)
    await scene.chunks(session, 3)
    await scene.ask(PAUSE_SESSION, SessionRef(session=session))
    await scene.until(lambda: scene.metric(source, HOST_BYTES) > 0, "its state is on the host")
    row = await begin(scene, session, target)
    report = await reported(scene, row, MigrationStage.FAILED)
    assert report.reason is not None
    assert report.reason.startswith("host_pool_full: ")
    assert scene.metric(target, BROKEN) == 1
    suspended = await abandon(scene, row)
    await scene.ask(RESUME_SESSION, SessionRef(session=session))
    await scene.place(session, source, "resume")
    assert (await scene.chunks(session, suspended.next_chunk + 2))[-1].header.worker == source


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_source_that_dies_is_reported_and_what_was_copied_goes(
    scene: Scene, number: signal.Signals
) -> None:
    limits = {"TURBOSERVE_MIGRATION_TIMEOUT_S": "6"}
    source, target = await scene.worker(), await scene.worker(**limits)
    session = await scene.started(source)
    await scene.chunks(session, 3)
    scene.signal(source, number)
    row = await begin(scene, session, target)
    report = await reported(scene, row, MigrationStage.FAILED)
    assert report.reason is not None
    assert report.reason.startswith(("peer_lost", "deadline_passed"))
    assert scene.metric(target, BROKEN) >= 1
    await abandon(scene, row)
    await empty(scene, target)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_target_that_dies_costs_the_source_nothing(scene: Scene, number: signal.Signals) -> None:
    source, target = await scene.worker(), await scene.worker()
    wanted = await not_migrated(scene, source, seed=6, count=14)
    session = await scene.started(source, seed=6)
    await scene.chunks(session, 3)
    row = await begin(scene, session, target)
    await asyncio.sleep(0.05)
    scene.signal(target, number)
    await abandon(scene, row)
    chunks = await scene.chunks(session, 14)
    assert video(chunks) == wanted
    assert {chunk.header.worker for chunk in chunks} == {source}


async def test_a_session_that_may_be_the_targets_already_stands_still_until_its_row_is_read(
    scene: Scene,
) -> None:
    source, target = await scene.worker(), await scene.worker()
    session = await scene.started(source)
    await scene.chunks(session, 3)
    row = await begin(scene, session, target)
    report = await reported(scene, row, MigrationStage.VERIFIED)
    scene.signal(target, signal.SIGKILL)

    async def counted() -> bool:
        await play_on(scene, session)
        return (await scene.record(session)).next_chunk >= report.next_chunk

    # The store counts a chunk after it is in the log.
    await scene.until(counted, "all chunks before the handoff are counted")
    for _ in range(7):
        await play_on(scene, session)
        await scene.more_reports(source, 1)
    assert (await scene.record(session)).next_chunk == report.next_chunk
    await abandon(scene, row)
    await scene.chunks(session, report.next_chunk + 3)


async def test_a_target_without_a_free_slot_says_so(scene: Scene) -> None:
    source, target = await scene.worker(), await scene.worker(TURBOSERVE_MODEL="toyworld")
    session = await scene.started(source)
    await scene.chunks(session, 2)
    row = await begin(scene, session, target)
    full = [await scene.started(target) for _ in range(1)]
    assert await reported(scene, row, MigrationStage.VERIFIED)
    # The slot reserved for the migration is not given to another session.
    extra = await scene.create()
    with pytest.raises(NoCapacityError):
        await scene.place(extra, target)
    await abandon(scene, row)
    await scene.place(extra, target)
    assert await scene.chunks(extra, 1)
    assert full

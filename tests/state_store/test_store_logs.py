"""The fence and the outbox beyond the broker's memory for duplicates, and with several stores."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest
from sqlalchemy import text

from tests.helpers.other_versions import NEWER, OLDER, of_version
from tests.helpers.waiting import eventually
from tests.state_store.conftest import StartStore
from tests.state_store.state_store_harness import LIMIT_S, Harness, Store
from turboserve import subjects
from turboserve.bus import append, last_entry
from turboserve.clock import SystemClock
from turboserve.contracts.chunks import Ownership
from turboserve.contracts.errors import FencedError, LogUnavailableError, UnavailableError
from turboserve.contracts.events import Event, PromptApplied, PromptSuperseded, WorkerJoined, WorkerLeft
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import Assignment
from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.hot.redis import RedisStore
from turboserve.state_store.hot.session_state import HotStoreGuard, Latents, Playheads
from turboserve.state_store.ports.records import SessionRow
from turboserve.state_store.publish import canaries
from turboserve.state_store.publish.canaries import Canaries, LogStatus
from turboserve.state_store.publish.fence import Assignments, Fence
from turboserve.state_store.publish.outbox import Outbox
from turboserve.state_store.repository.progress import SqlFence
from turboserve.state_store.retention import ROWS, Retention
from turboserve.state_store.service.sessions import Sessions
from turboserve.state_store.service.transactions import PostCommit
from turboserve.state_store.settings import Settings

WINDOW_S = 0.2


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"duplicate_window_s": WINDOW_S})


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the store itself from removing anything, because the time of its first removal is not known."""

    async def never(_: Retention) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Retention, "run", never)


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fence], Awaitable[int]]:
    """`Fence.verify`; a store started after this does not verify by itself."""
    verify = Fence.verify

    async def nothing_is_lost(_: Fence) -> int:
        return 0

    monkeypatch.setattr(Fence, "verify", nothing_is_lost)
    return verify


class Parts:
    """The parts of a store that follow a commit, driven by hand beside the store that serves."""

    def __init__(self, api: Harness, store: Store, settings: Settings) -> None:
        self.database = PostgresDatabase(settings)
        clock = store.runtime.clock
        self.hot = HotStoreGuard(RedisStore(settings), clock)
        playheads = Playheads(self.hot, clock)
        assignments = Assignments(api.bus, self.database, playheads)
        appender = Canaries(api.bus, clock, settings)
        self.fence = Fence(self.database, api.bus, assignments, appender)
        self.outbox = Outbox(self.database, api.bus, clock, settings)
        latents = Latents(self.hot, kept=settings.latents_kept, ttl_s=settings.latents_ttl_s)
        post_commit = PostCommit(self.outbox, self.fence, assignments, playheads)
        status = LogStatus(appender, settings)
        sessions = Sessions(self.database, post_commit, playheads, latents, status, clock, settings)
        self.retention = Retention(self.database, sessions, playheads, self.hot, api.bus, clock, settings)

    async def sql(self, statement: str, **values: object) -> list[tuple[object, ...]]:
        async with self.database.transaction() as db:
            result = await db.connection.execute(text(statement), values)
            return [tuple(row) for row in result.fetchall()] if result.returns_rows else []


@pytest.fixture
async def parts(api: Harness, store: Store, settings: Settings) -> AsyncIterator[Parts]:
    parts = Parts(api, store, settings)
    yield parts
    await parts.database.close()
    await parts.hot.close()


async def owns(api: Harness, record: SessionRecord) -> list[int]:
    return [Ownership.from_bytes(body).epoch for _, body in await api.history(subjects.OWN.of(record.id))]


async def test_an_owner_written_long_ago_is_found_again_and_not_written_twice(
    api: Harness, parts: Parts
) -> None:
    record = await api.running("late-owner")
    reassigned = await api.place(record, await api.worker("late-owner"))
    await asyncio.sleep(2 * WINDOW_S)
    # As left by a crash between the append and the record of its sequence.
    await parts.sql(
        "update sessions set own_revision = null, fence_revision = :before where id = :id",
        before=record.own_revision,
        id=record.id,
    )
    settled = await parts.fence.settle(record.id)
    assert settled is not None
    assert settled.own_revision == reassigned.own_revision
    assert await owns(api, record) == [1, 2]
    await api.chunk(reassigned, 0)


async def test_an_owner_of_an_unknown_epoch_is_followed(api: Harness, parts: Parts) -> None:
    record = await api.running("skipped")
    reassigned = await api.place(record, await api.worker("skipped"))
    await asyncio.sleep(2 * WINDOW_S)
    # Epoch 3 is committed by a store that does not know epoch 2's place in the log.
    await parts.sql(
        "update sessions set epoch = 3, own_revision = null, fence_revision = :before where id = :id",
        before=record.own_revision,
        id=record.id,
    )
    await asyncio.gather(*(parts.fence.settle(record.id) for _ in range(4)))
    assert await owns(api, record) == [1, 2, 3]
    with pytest.raises(FencedError):
        await api.chunk(reassigned, 0)
    await api.chunk(await api.get(record.id), 0)


async def test_a_former_owner_is_informed_also_where_a_sweep_wrote_the_fence_first(
    api: Harness, parts: Parts
) -> None:
    """Incident: a sweep wrote the fence of a session's end, and its worker was not told."""
    record = await api.running("informed")
    reassigned = await api.place(record, await api.worker("informed"))
    received: list[Assignment] = []

    async def on_assignment(message: Assignment, _: bytes) -> None:
        received.append(message)

    former = str(record.worker)
    await api.bus.subscribe(subjects.ASSIGN, former, on_assignment)
    await api.bus.flush()
    assert record.own_revision is not None
    committed = SessionRow(reassigned.model_copy(update={"own_revision": None}), record.own_revision)
    settled = await parts.fence.settle(record.id, former, known=committed)
    assert settled is not None
    assert settled.own_revision == reassigned.own_revision
    await eventually(lambda: received)
    assert (received[0].record.epoch, received[0].record.worker) == (2, reassigned.worker)


async def test_no_chunk_passes_for_an_owner_by_its_message_id(api: Harness) -> None:
    """A worker's credential may append any chunk.

    Incident: the broker would have answered the store's own entry as a repetition of such a chunk, and the
    new owner's chunks would have met a fence that does not exist.
    """
    record = await api.running("poisoned")
    for epoch in range(1, 6):
        body = b"not an owner"
        await append(
            api.bus, subjects.CHUNK.by("ses_poison", "wrk_1"), body, message_id=f"own:{record.id}:{epoch}"
        )
    reassigned = await api.place(record, await api.worker("poisoned"))
    assert await owns(api, record) == [1, 2]
    await api.chunk(reassigned, 0)
    with pytest.raises(FencedError):
        await api.chunk(record, 1)


async def test_verification_leaves_what_agrees_alone_and_writes_what_is_lost(
    verify: Callable[[Fence], Awaitable[int]], api: Harness, parts: Parts
) -> None:
    record, other = await api.running("verify"), await api.running("verify2")
    assert await verify(parts.fence) == 0
    await api.bus.jetstream().purge_stream(subjects.CHUNKS, subject=subjects.OWN.of(record.id))
    await asyncio.sleep(2 * WINDOW_S)
    assert await verify(parts.fence) == 1
    row = await api.get(record.id)
    assert (row.epoch, row.version) == (record.epoch, record.version + 1)
    assert row.own_revision != record.own_revision
    await api.chunk(row, 0)
    assert (await api.get(other.id)).version == other.version


LOST = 300
"""Sequences by which the log is shorter than it was."""


async def shortened(parts: Parts, record: SessionRecord) -> int:
    """Make the log appear to have lost its end, with the fence of `record`. Returns the fence's revision."""
    rows = await parts.sql(
        "update sessions set own_revision = own_revision + :lost, fence_revision = fence_revision + :lost "
        "where id = :id returning own_revision",
        lost=LOST,
        id=record.id,
    )
    return int(str(rows[0][0]))


async def test_no_fence_has_the_sequence_of_one_that_was_lost_with_the_end_of_the_log(
    verify: Callable[[Fence], Awaitable[int]], api: Harness, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: the next fence had, so that a worker that was cut off could append again."""
    monkeypatch.setattr(canaries, "DEADLINE_S", LIMIT_S)
    record, ended = await api.running("shorter"), await api.running("shorter2")
    greatest = await shortened(parts, record)
    assert await verify(parts.fence) == 1
    row = await api.get(record.id)
    assert row.epoch == record.epoch
    assert row.own_revision is not None
    assert row.own_revision > greatest
    # What is left of the log names the same owner, as a late copy of the lost fence does.
    assert await owns(api, record) == [1, 1]
    with pytest.raises(FencedError):
        await api.chunk(record, 0)
    await api.chunk(row, 0)
    # Lost a second time, and the session ends before the loss is noticed.
    greatest = await shortened(parts, ended)
    await api.end(ended.id)

    async def settled() -> bool:
        return (await api.get(ended.id)).own_revision is not None

    await eventually(settled)
    row = await api.get(ended.id)
    assert row.own_revision is not None
    assert row.own_revision > greatest


async def test_a_stream_that_has_lost_much_is_advanced_in_several_calls(
    monkeypatch: pytest.MonkeyPatch, api: Harness, settings: Settings
) -> None:
    monkeypatch.setattr(canaries, "ADVANCE_LIMIT", 2 * canaries.ADVANCE_TOGETHER)
    monkeypatch.setattr(canaries, "DEADLINE_S", LIMIT_S)
    jetstream = api.bus.jetstream()
    first = (await jetstream.stream_info(subjects.CHUNKS)).state.last_seq
    target = first + 3 * canaries.ADVANCE_TOGETHER
    appender = Canaries(api.bus, SystemClock(), settings)
    with pytest.raises(LogUnavailableError) as error:
        await appender.advance(subjects.CANARY_CHUNKS, target + 1_000)
    assert (error.value.field, error.value.limit) == (subjects.CHUNKS, target + 1_000)
    await appender.advance(subjects.CANARY_CHUNKS, target)
    assert (await jetstream.stream_info(subjects.CHUNKS)).state.last_seq >= target


async def test_no_worker_learns_a_fence_that_its_row_does_not_have(
    monkeypatch: pytest.MonkeyPatch, api: Harness, parts: Parts
) -> None:
    """A store that is killed in between leaves a fence that no later one is compared with."""
    store = SqlFence.store

    async def slowly(fence: SqlFence, session: str, epoch: int, revision: int) -> SessionRecord | None:
        await asyncio.sleep(0.3)
        return await store(fence, session, epoch, revision)

    monkeypatch.setattr(SqlFence, "store", slowly)
    record, worker = await api.running("stored"), await api.worker("stored")
    found: asyncio.Queue[tuple[SessionRecord, SessionRecord]] = asyncio.Queue()

    async def hear(message: Assignment, _: bytes) -> None:
        found.put_nowait((message.record, await api.get(record.id)))

    await api.bus.subscribe(subjects.ASSIGN, worker, hear)
    await api.bus.flush()
    await api.place(record, worker)
    async with asyncio.timeout(LIMIT_S):
        heard, row = await found.get()
    assert heard.own_revision is not None
    assert (heard.epoch, heard.own_revision) == (row.epoch, row.own_revision)


async def test_the_owner_learns_that_the_log_lost_its_fence(
    verify: Callable[[Fence], Awaitable[int]], api: Harness, parts: Parts
) -> None:
    record = await api.running("learns")
    assert record.worker is not None
    assigned: asyncio.Queue[SessionRecord] = asyncio.Queue()

    async def hear(message: Assignment, _: bytes) -> None:
        assigned.put_nowait(message.record)

    await api.bus.subscribe(subjects.ASSIGN, record.worker, hear)
    await api.bus.flush()
    await api.bus.jetstream().purge_stream(subjects.CHUNKS, subject=subjects.OWN.of(record.id))
    assert await verify(parts.fence) == 1
    row = await api.get(record.id)
    assert row.log_losses == record.log_losses + 1
    async with asyncio.timeout(LIMIT_S):
        while True:
            heard = await assigned.get()
            if (heard.own_revision, heard.log_losses) == (row.own_revision, row.log_losses):
                break


async def test_an_entry_of_an_earlier_epoch_at_the_rows_revision_is_no_fence(
    verify: Callable[[Fence], Awaitable[int]], api: Harness, parts: Parts
) -> None:
    """A store that was slow wrote it into the new stream, where the lost one had the row's own fence."""
    record = await api.running("earlier")
    await parts.sql("update sessions set epoch = epoch + 1 where id = :id", id=record.id)
    assert await verify(parts.fence) == 1
    row = await api.get(record.id)
    assert row.own_revision not in (None, record.own_revision)
    assert await owns(api, record) == [1, 2]
    await api.chunk(row, 0)


@pytest.mark.parametrize("version", [OLDER, None, NEWER])
async def test_verification_writes_the_fence_of_an_older_major_again_and_keeps_a_newer_one(
    verify: Callable[[Fence], Awaitable[int]], api: Harness, parts: Parts, version: str | None
) -> None:
    record = await api.running(f"verify-{version}".replace(".", "-"))
    subject = subjects.OWN.of(record.id)
    await api.bus.jetstream().purge_stream(subjects.CHUNKS, subject=subject)
    own = Ownership(session=record.id, epoch=record.epoch, worker=record.worker)
    ack = await append(api.bus, subject, of_version(own, version), message_id=f"own-{record.id}")
    await parts.sql(
        "update sessions set own_revision = :sequence, fence_revision = :sequence where id = :id",
        sequence=ack.sequence,
        id=record.id,
    )
    newer = version == NEWER
    assert await verify(parts.fence) == (0 if newer else 1)
    row = await api.get(record.id)
    assert row.epoch == record.epoch
    if newer:
        assert row.own_revision == ack.sequence
        # The next tests verify all sessions.
        await api.end(record.id)
        return
    assert row.own_revision is not None
    assert row.own_revision > ack.sequence
    entry = await last_entry(api.bus, subjects.CHUNKS, subject)
    assert entry is not None
    assert Ownership.from_bytes(entry.data) == own
    await api.chunk(row, 0)
    assert await verify(parts.fence) == 0


async def test_events_published_long_ago_are_recognised_in_the_log(api: Harness, parts: Parts) -> None:
    record = await api.running("late-events")
    await api.prompt(record.id, "one")
    await api.prompt(record.id, "two")
    types = ("session.created", "session.placed", "prompt.accepted", "prompt.accepted")
    events = await api.until_events(record.id, *types)

    async def empty() -> bool:
        return await parts.sql("select 1 from outbox") == []

    await eventually(empty)
    await asyncio.sleep(2 * WINDOW_S)
    # As left by a crash before the removal, with one more that was never published.
    async with parts.database.transaction() as db:
        await db.outbox.add(events[2:])
        again = events[3].model_copy(update={"id": "ev_never_published"})
        await db.outbox.add([again])
        await db.connection.execute(text("update outbox set created_at = created_at - 60"))

    async def drained() -> bool:
        # The store that serves takes turns too; a late one is given up.
        with suppress(UnavailableError):
            await parts.outbox.drain()
        return await empty()

    await eventually(drained)
    found = await api.events(record.id)
    assert [event.id for event in found] == [*(event.id for event in events), "ev_never_published"]


async def test_several_publishers_keep_the_order(api: Harness, parts: Parts, start_store: StartStore) -> None:
    await start_store()
    await start_store()
    records = [await api.running(f"ordered{n}") for n in range(4)]

    async def talk(record: SessionRecord) -> None:
        for number in range(15):
            await api.prompt(record.id, f"prompt {number}")

    await asyncio.gather(*(talk(record) for record in records))
    for record in records:
        accepted = ["prompt.accepted"] * 15
        events = await api.until_events(record.id, "session.created", "session.placed", *accepted)
        prompts = [event.prompt for event in events[2:]]  # type: ignore[union-attr]
        assert prompts == [f"prompt {number}" for number in range(15)]


async def test_ended_sessions_leave_the_log_after_their_time_and_the_old_owner_stays_out(
    api: Harness, parts: Parts, settings: Settings
) -> None:
    record = await api.running("retention")
    await api.chunk(record, 0)
    going_on = await api.running("retention2")
    await api.chunk(going_on, 0)
    await api.end(record.id)
    assert await parts.retention.purge() == 0
    longer = settings.chunk_retention_s + 1
    await parts.sql("update sessions set ended_at = ended_at - :s where id = :id", s=longer, id=record.id)
    assert await parts.retention.purge() == 1
    assert await parts.retention.purge() == 0
    assert await last_entry(api.bus, subjects.CHUNKS, subjects.CHUNK.of(record.id)) is None
    assert await last_entry(api.bus, subjects.CHUNKS, subjects.CHUNK.of(going_on.id)) is not None
    with pytest.raises(FencedError):
        await append(
            api.bus,
            subjects.CHUNK.by(record.id, "wrk_1"),
            b"late",
            message_id=f"{record.id}:1",
            expect=(subjects.OWN.of(record.id), record.own_revision or 0),
        )
    assert await parts.fence.sweep() == 0
    await parts.sql(
        "update sessions set ended_at = ended_at - :s where id = :id",
        s=settings.session_retention_s,
        id=record.id,
    )
    await parts.retention.purge()
    assert await parts.sql("select 1 from sessions where id = :id", id=record.id) == []
    assert await parts.sql("select 1 from decisions where session = :id", id=record.id) == []
    assert (await api.get(going_on.id)).next_chunk <= 1


async def test_any_number_of_ended_sessions_is_purged_and_deleted_at_once(
    api: Harness, parts: Parts, settings: Settings
) -> None:
    """Incident: a hundred per round were too few for one tenant; all rows in one statement were too many."""
    record = await api.running("many")
    await api.end(record.id)
    copies = 2 * ROWS + 1
    await parts.sql(
        """
        insert into sessions overriding system value
        select (jsonb_populate_record(sessions, jsonb_build_object(
            'id', sessions.id || '_' || n, 'number', sessions.number + 1000000 + n, 'ended_at', 1.0
        ))).* from sessions, generate_series(1, :copies) as n where id = :id
        """,
        id=record.id,
        copies=copies,
    )
    like = record.id + "!_%"
    await parts.sql(
        "update sessions set ended_at = :now where id like :like escape '!'",
        now=time.time() - settings.chunk_retention_s - 60.0,
        like=like,
    )
    assert await parts.retention.purge() == copies
    await parts.sql("update sessions set ended_at = 1.0 where id like :like escape '!'", like=like)
    await parts.retention.purge()
    assert await parts.sql("select id from sessions where id like :like escape '!'", like=like) == []
    assert (await api.get(record.id)).phase.ended


async def test_chunks_are_counted_once_under_any_leader(
    api: Harness, start_store: StartStore, settings: Settings
) -> None:
    second = await start_store()
    record = await api.running("counted")
    receipts = [await api.prompt(record.id, f"prompt {n}") for n in range(3)]
    for index in range(30):
        await api.chunk(record, index, control_seq=min(index // 8, 3))
        if index == 15:
            # The leader stops in the middle; the remaining one continues.
            for task in second.runtime._tasks:
                if task.get_name() == "accounting":
                    task.cancel()

    async def counted() -> bool:
        return (await api.get(record.id)).next_chunk == 30

    await eventually(counted)
    applied = ["prompt.applied"] * 3
    events = await api.until_events(
        record.id, "session.created", "session.placed", *["prompt.accepted"] * 3, *applied
    )
    assert [(event.prompt_id, event.chunk_index) for event in events[5:]] == [  # type: ignore[union-attr]
        (receipt.prompt_id, 8 * (n + 1)) for n, receipt in enumerate(receipts)
    ]


def numbers_of(events: list[Event]) -> list[int]:
    return [
        event.record.event_sequence for event in events if not isinstance(event, WorkerJoined | WorkerLeft)
    ]


async def test_of_prompts_before_one_chunk_only_the_newest_is_applied(api: Harness) -> None:
    record = await api.running("superseded")
    first, second, third = [await api.prompt(record.id, text) for text in ("first", "second", "third")]
    await api.chunk(record, 0, control_seq=3)
    # Chunks under the same prompt settle nothing again, and a later prompt supersedes nothing settled.
    await api.chunk(record, 1, control_seq=3)
    settled = (
        *("session.created", "session.placed", *["prompt.accepted"] * 3),
        *("prompt.superseded", "prompt.superseded", "prompt.applied"),
    )
    await api.until_events(record.id, *settled)
    fourth = await api.prompt(record.id, "fourth")
    await api.chunk(record, 2, control_seq=4)
    events = await api.until_events(record.id, *settled, "prompt.accepted", "prompt.applied")
    superseded = [event for event in events if isinstance(event, PromptSuperseded)]
    assert [(event.prompt_id, event.control_seq, event.prompt) for event in superseded] == [
        (first.prompt_id, 1, "first"),
        (second.prompt_id, 2, "second"),
    ]
    assert {event.superseded_by for event in superseded} == {third.prompt_id}
    applied = [event for event in events if isinstance(event, PromptApplied)]
    assert [(event.prompt_id, event.chunk_index) for event in applied] == [
        (third.prompt_id, 0),
        (fourth.prompt_id, 2),
    ]
    assert numbers_of(events) == list(range(1, 11))
    assert (await api.get(record.id)).event_sequence == 10


async def test_events_of_each_session_have_numbers_of_their_own(api: Harness) -> None:
    records = [await api.running("numbered"), await api.running("numbered")]
    for _ in range(3):
        for record in records:
            await api.prompt(record.id, "next")
    for record in records:
        await api.end(record.id)
        events = await api.until_events(
            record.id, "session.created", "session.placed", *["prompt.accepted"] * 3, "session.ended"
        )
        numbers = [
            event.record.event_sequence
            for event in events
            if not isinstance(event, WorkerJoined | WorkerLeft)
        ]
        assert numbers == [1, 2, 3, 4, 5, 6]

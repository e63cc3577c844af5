"""Start position of viewers when the log keeps nothing of a session that already made chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from nats.js import api

from tests.helpers.chunk_headers import chunk_header
from tests.helpers.followers import acquainted
from tests.helpers.waiting import eventually
from turboserve.bus import Bus, append
from turboserve.bus.chunk_log import ChunkLog, StreamStart
from turboserve.cli.embedded import NatsServer
from turboserve.config import Settings
from turboserve.contracts.chunks import Ownership
from turboserve.contracts.errors import ChunkGoneError, UnavailableError
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.ids import new_id
from turboserve.subjects import CHUNK, CHUNKS, OWN
from turboserve.tasks import stop

LIMIT_S = 60


# Every test creates the stream again: the broker may still be deleting the last one's files.
STREAM = api.StreamConfig(
    name=CHUNKS,
    subjects=[OWN.every, CHUNK.every],
    storage=api.StorageType.MEMORY,
    allow_direct=True,
)


@pytest.fixture
async def bus(nats_url: str, nats_server: NatsServer) -> AsyncIterator[Bus]:
    bus = await Bus.connect("admin", Settings(nats_url=nats_server.url("admin")))
    await bus.jetstream(LIMIT_S).add_stream(STREAM)
    yield bus
    await bus.jetstream(LIMIT_S).delete_stream(CHUNKS)
    await bus.close()


@pytest.fixture
def log(bus: Bus) -> ChunkLog:
    return ChunkLog(bus)


def record(next_chunk: int, playhead_s: float) -> SessionRecord:
    return SessionRecord(
        id="ses_a",
        tenant="t",
        model="m",
        prompt="x",
        seed=1,
        phase=Phase.ACTIVE,
        version=3,
        epoch=1,
        next_chunk=next_chunk,
        playhead_s=playhead_s,
        created_at=1.0,
        updated_at=1.0,
    )


async def test_a_new_session_begins_at_its_beginning(log: ChunkLog) -> None:
    row = record(0, 0.0)
    assert await log.at(row, 0.0) == await log.after(row, -1) == StreamStart(0, 0.0, 0)
    with pytest.raises(ChunkGoneError) as gone:
        await log.after(row, 0)
    assert gone.value.limit == 0


async def test_an_empty_log_goes_on_at_the_next_chunk(log: ChunkLog) -> None:
    row = record(100, 72.0)
    start = await log.at(row, 72.0)
    # The 100 chunks end at most the lead of 3 s and a chunk after the playhead, so the worker need not wait.
    assert (start.index, start.sequence) == (100, 0)
    assert start.start_s > 72.0 + 3.0
    assert await log.after(row, 99) == start
    with pytest.raises(ChunkGoneError) as gone:
        await log.after(row, 41)
    assert gone.value.limit == 100
    with pytest.raises(ChunkGoneError) as gone:
        await log.after(row, 100)
    assert gone.value.limit == 100


async def test_the_beginning_of_an_empty_log_is_gone_if_chunks_were_made(log: ChunkLog) -> None:
    """Incident: a viewer that asked for the beginning got chunk 7 as the first, without an error."""
    with pytest.raises(ChunkGoneError) as gone:
        await log.after(record(7, 3.0), -1)
    assert gone.value.limit == 7


async def chunk(
    bus: Bus, index: int, *, contiguous_from: int = 0, epoch: int = 1, worker: str = "wrk_a"
) -> None:
    header = chunk_header("ses_a", index, epoch, worker)
    header = header.model_copy(update={"contiguous_from": contiguous_from})
    subject = CHUNK.by("ses_a", worker)
    await append(
        bus, subject, b"video", message_id=new_id("test"), headers=header.to_headers(), deadline_s=LIMIT_S
    )


async def test_a_copy_of_the_owners_header_with_a_far_index_ends_no_search(bus: Bus, log: ChunkLog) -> None:
    """Incident: it was requested again for every viewer who returned to a chunk behind it."""
    own = Ownership(session="ses_a", epoch=1, worker="wrk_a")
    await append(bus, OWN.of("ses_a"), own.to_bytes(), message_id="own", deadline_s=LIMIT_S)
    for index in (0, 1, 2, 3, 50, 4, 5, 6, 7):
        await chunk(bus, index)
    row = record(8, 0.0)
    async with asyncio.timeout(LIMIT_S):
        for index in range(7):
            assert (await log.after(row, index)).index == index + 1
        assert (await log.at(row, 3.0)).index == 4


async def owned(bus: Bus, epoch: int = 1, worker: str = "wrk_a") -> None:
    own = Ownership(session="ses_a", epoch=epoch, worker=worker)
    await append(bus, OWN.of("ses_a"), own.to_bytes(), message_id=new_id("own"), deadline_s=LIMIT_S)


async def no_row() -> int:
    pytest.fail("the log was not lost")


async def test_viewers_begin_behind_chunks_that_the_log_has_lost(bus: Bus, log: ChunkLog) -> None:
    """The broker came back without chunks 4 to 6, and their owner went on."""
    await owned(bus)
    for index in range(4):
        await chunk(bus, index)
    for index in (7, 8):
        await chunk(bus, index, contiguous_from=7)
    row = record(9, 3.0)
    seen: list[int] = []

    async def view() -> None:
        async for found in log.follow("ses_a", StreamStart(2, 1.5, 1), asyncio.Event(), no_row):
            seen.append(found.header.index)

    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(ChunkGoneError) as gone:
            await view()
        assert seen == [2, 3]
        assert gone.value.limit == 7
        for after in (0, 3, 5):
            with pytest.raises(ChunkGoneError) as gone:
                await log.after(row, after)
            assert gone.value.limit == 7
        assert (await log.after(row, 6)).index == 7
        # The playhead is at a lost chunk.
        assert (await log.at(row, 4.0)).index == 7


@pytest.mark.parametrize("more", [(), (8, 9)])
@pytest.mark.parametrize("copy", [(), (50,)])
async def test_a_hole_that_no_header_names_ends_at_the_next_chunk_of_the_log(
    bus: Bus, log: ChunkLog, copy: tuple[int, ...], more: tuple[int, ...]
) -> None:
    """The owner did not know of the loss. `copy`: an entry with an owner's header and a far index."""
    await owned(bus)
    for index in (0, 1, 2, 3, *copy, 7, *more):
        await chunk(bus, index)
    row = record(8 + len(more), 4.0)
    async with asyncio.timeout(LIMIT_S):
        for after in (3, 4, 5):
            with pytest.raises(ChunkGoneError) as gone:
                await log.after(row, after)
            assert gone.value.limit == 7
        assert (await log.after(row, 6)).index == 7
        # Chunks of 0.75 s: the playhead is at chunk 5.
        assert (await log.at(row, 4.0)).index == 7


async def test_a_viewer_beyond_the_end_that_is_left_waits_for_what_the_row_has_counted(
    bus: Bus, log: ChunkLog
) -> None:
    await owned(bus)
    for index in range(4):
        await chunk(bus, index)
    row = record(7, 3.0)
    async with asyncio.timeout(LIMIT_S):
        start = await log.after(row, 6)
        # Chunks of 0.75 s: chunk 7 begins at 5.25 s.
        assert (start.index, start.start_s) == (7, 5.25)
        # Chunks 4 to 6 were counted, so they were in the log. The owner continues with chunk 7.
        for after in (3, 5, 7):
            with pytest.raises(ChunkGoneError) as gone:
                await log.after(row, after)
            assert gone.value.limit == 7


async def test_a_viewer_of_chunks_that_log_and_owner_have_lost_begins_again(bus: Bus, log: ChunkLog) -> None:
    """The next owner makes chunks with the numbers of those that were seen, and other contents."""
    await owned(bus)
    for index in range(4):
        await chunk(bus, index)
    seen: list[int] = []
    four = asyncio.Event()

    async def view() -> None:
        async for found in log.follow("ses_a", StreamStart(0, 0.0, 0), asyncio.Event(), no_row):
            seen.append(found.header.index)
            if len(seen) == 4:
                four.set()

    viewing = asyncio.create_task(view())
    async with asyncio.timeout(LIMIT_S):
        await four.wait()
        await owned(bus, 2, "wrk_b")
        await chunk(bus, 2, epoch=2, worker="wrk_b")
        with pytest.raises(ChunkGoneError) as gone:
            await viewing
    assert gone.value.limit == 2
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("made", [7, 4])
async def test_a_viewer_whose_next_chunk_was_lost_with_the_log_begins_again(
    bus: Bus, log: ChunkLog, made: int
) -> None:
    """It had not received chunks 4 to 6.

    No chunk comes that would show it: the worker waits for its playhead.
    """
    own = Ownership(session="ses_a", epoch=1, worker="wrk_a")
    await append(bus, OWN.of("ses_a"), own.to_bytes(), message_id="own", deadline_s=LIMIT_S)
    asked = 0

    async def of_the_row() -> int:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise UnavailableError("the store is away")
        return made

    async def next_chunk() -> None:
        async for _ in log.follow("ses_a", StreamStart(4, 3.0, 1), asyncio.Event(), of_the_row):
            pytest.fail("there is none")

    following = asyncio.create_task(next_chunk())
    async with asyncio.timeout(LIMIT_S):
        await acquainted(bus, CHUNKS)
        await bus.jetstream(LIMIT_S).delete_stream(CHUNKS)
        await bus.jetstream(LIMIT_S).add_stream(STREAM)
        if made > 4:
            with pytest.raises(ChunkGoneError) as gone:
                await following
            assert gone.value.limit == 7
            return
        await eventually(lambda: asked >= 2)
        assert not following.done()
    await stop(following)


@pytest.mark.parametrize(("counted", "limit"), [(9, 9), (6, None), (5, None)])
async def test_a_viewer_behind_the_end_that_is_left_begins_again_if_more_was_counted(
    bus: Bus, log: ChunkLog, counted: int, limit: int | None
) -> None:
    """The log has lost chunks 4 to 8. The viewer had received chunks up to 5."""
    await owned(bus)
    for index in range(4):
        await chunk(bus, index)
    asked = asyncio.Event()

    async def of_the_row() -> int:
        asked.set()
        return counted

    async def view() -> int:
        async for found in log.follow("ses_a", StreamStart(6, 4.5, 500), asyncio.Event(), of_the_row):
            return found.header.index
        pytest.fail("the viewer has ended")

    viewing = asyncio.create_task(view())
    async with asyncio.timeout(LIMIT_S):
        await asked.wait()
        if limit is None:
            # It still waits, and gets the next chunk.
            await chunk(bus, 6)
            assert await viewing == 6
            return
        with pytest.raises(ChunkGoneError) as gone:
            await viewing
        assert gone.value.limit == limit


async def test_a_viewer_inside_a_hole_that_no_header_names_begins_again(bus: Bus, log: ChunkLog) -> None:
    """The log has lost chunks 3 and 4, and their owner died when it had not named the loss yet.

    Chunk 50 is an entry with an owner's header before its turn, which ends no video.
    """
    await owned(bus)
    for index in (0, 1, 50, 2):
        await chunk(bus, index)
    seen: list[int] = []
    three = asyncio.Event()

    async def view() -> None:
        async for found in log.follow("ses_a", StreamStart(0, 0.0, 0), asyncio.Event(), no_row):
            seen.append(found.header.index)
            if len(seen) == 3:
                three.set()

    viewing = asyncio.create_task(view())
    async with asyncio.timeout(LIMIT_S):
        await three.wait()
        await chunk(bus, 5)
        await owned(bus, 2, "wrk_b")
        await chunk(bus, 6, epoch=2, worker="wrk_b")
        with pytest.raises(ChunkGoneError) as gone:
            await viewing
    assert gone.value.limit == 5
    assert seen == [0, 1, 2]

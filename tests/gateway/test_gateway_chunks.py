"""Where viewers begin when the log keeps nothing of a session that already made chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from nats.js import api

from turboserve.bus import Bus
from turboserve.cli.embedded import NatsServer
from turboserve.config import Settings
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.gateway.problems.errors import ChunkGoneError, ChunkNotMadeError
from turboserve.gateway.stream.chunks import ChunkLog, Start
from turboserve.subjects import CHUNK, CHUNKS, OWN


@pytest.fixture
async def log(nats_url: str, nats_server: NatsServer) -> AsyncIterator[ChunkLog]:
    bus = await Bus.connect("admin", Settings(nats_url=nats_server.url("admin")))
    stream = api.StreamConfig(name=CHUNKS, subjects=[OWN.every, CHUNK.every], allow_direct=True)
    await bus.jetstream().add_stream(stream)
    yield ChunkLog(bus)
    await bus.jetstream().delete_stream(CHUNKS)
    await bus.close()


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
    assert await log.at(row, 0.0) == await log.after(row, -1) == Start(0, 0.0, 0)
    with pytest.raises(ChunkNotMadeError):
        await log.after(row, 0)


async def test_an_empty_log_goes_on_at_the_next_chunk(log: ChunkLog) -> None:
    row = record(100, 72.0)
    start = await log.at(row, 72.0)
    # The 100 chunks end at most the lead of 3 s and a chunk after the playhead: the worker must not wait.
    assert (start.index, start.sequence) == (100, 0)
    assert start.start_s > 72.0 + 3.0
    assert await log.after(row, 99) == start
    with pytest.raises(ChunkGoneError) as gone:
        await log.after(row, 41)
    assert gone.value.limit == "100"
    with pytest.raises(ChunkNotMadeError):
        await log.after(row, 100)

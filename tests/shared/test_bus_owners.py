"""Which entries of a chunk log its session's owners wrote, by the entries of `own.<session>`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from nats.js import api

from turboserve.bus import Bus, Owners, append, last_entry
from turboserve.bus.log import Entry
from turboserve.contracts.chunks import HEADER, ChunkHeader, Ownership
from turboserve.ids import new_id
from turboserve.subjects import CHUNK, CHUNKS, OWN

SESSION = "ses_a"
KEPT = 8
"""Entries that the stream keeps of one subject."""


@pytest.fixture
async def store(connect) -> AsyncIterator[Bus]:  # type: ignore[no-untyped-def]
    bus = await connect("admin")
    await make_stream(bus)
    yield bus
    await bus.jetstream().delete_stream(CHUNKS)


async def make_stream(bus: Bus) -> None:
    await bus.jetstream().add_stream(
        api.StreamConfig(
            name=CHUNKS,
            subjects=[OWN.every, CHUNK.every],
            max_msgs_per_subject=KEPT,
            allow_direct=True,
            republish=api.RePublish(src=">", dest="live.>"),
        )
    )


class Foreign:
    """A reader's owners, and how many entries were no owner's."""

    def __init__(self, bus: Bus) -> None:
        self.count = 0
        self.owners = Owners(bus, self._one)

    def _one(self) -> None:
        self.count += 1


async def own(bus: Bus, epoch: int, worker: str | None, session: str = SESSION) -> int:
    body = Ownership(session=session, epoch=epoch, worker=worker).to_bytes()
    return (await append(bus, OWN.of(session), body, message_id=new_id("own"))).sequence


async def chunk(bus: Bus, index: int, epoch: int, worker: str, session: str = SESSION) -> Entry:
    """An append without the fence: what anybody with a worker's credentials can do."""
    header = ChunkHeader(
        session=session,
        index=index,
        epoch=epoch,
        worker=worker,
        control_seq=0,
        first_frame=12 * index,
        frames=12,
        fps=16.0,
        width=64,
        height=64,
        codec="avc1.42c01e",
        init_bytes=0,
    )
    await append(bus, CHUNK.of(session), b"video", message_id=new_id("test"), headers=header.to_headers())
    entry = await last_entry(bus, CHUNKS, CHUNK.of(session))
    assert entry is not None
    return entry


async def test_only_the_owner_at_an_entrys_place_has_written_it(store: Bus, connect) -> None:  # type: ignore[no-untyped-def]
    reader = Foreign(await connect("gateway"))
    early = await chunk(store, 0, 1, "w1")
    await own(store, 1, "w1")
    first = await chunk(store, 0, 1, "w1")
    wrong = [await chunk(store, 4, 1, "w2"), await chunk(store, 4, 2, "w1"), await chunk(store, 4, 0, "w1")]
    await own(store, 2, "w2")
    second = await chunk(store, 1, 2, "w2")
    former = await chunk(store, 2, 1, "w1")
    # In the order of the log, and once more from the reader's memory, the other way round.
    for entries in ((early, first, *wrong, second, former), (former, second, *wrong, first, early)):
        reader.count = 0
        for entry in entries:
            header = await reader.owners.header(SESSION, entry, len(entry.data))
            assert (header is not None) == (entry in (first, second)), entry.headers[HEADER]
        assert reader.count == 5


async def test_the_newest_chunk_is_found_behind_what_no_owner_wrote(store: Bus, connect) -> None:  # type: ignore[no-untyped-def]
    reader = Foreign(await connect("worker"))
    await own(store, 1, "w1")
    assert await reader.owners.newest(SESSION) is None
    assert await reader.owners.first(SESSION, 1) is None
    for index in range(3):
        await chunk(store, index, 1, "w1")
    await own(store, 2, "w2")
    for _ in range(3):
        await chunk(store, 100, 1, "w1")
        # Messages of other sessions lie between.
        for _ in range(40):
            await own(store, 1, "w9", "ses_other")
    await append(store, CHUNK.of(SESSION), b"", message_id=new_id("test"), headers={HEADER: "{}"})
    found = await reader.owners.newest(SESSION)
    assert found is not None
    assert (found[0].index, found[0].worker) == (2, "w1")
    oldest = await reader.owners.first(SESSION, 1)
    assert oldest is not None
    assert oldest[0].index == 0


async def test_a_session_with_more_owners_than_the_log_keeps(store: Bus, connect) -> None:  # type: ignore[no-untyped-def]
    """Chunks of owners whose entry is gone still count; nobody can write such a chunk for a new session."""
    reader = Foreign(await connect("gateway"))
    entries = []
    for epoch in range(1, KEPT + 4):
        await own(store, epoch, f"w{epoch}")
        entries.append(await chunk(store, epoch, epoch, f"w{epoch}"))
    for entry in entries:
        assert await reader.owners.header(SESSION, entry) is not None
    fresh = await chunk(store, 0, 1, "w1", "ses_new")
    assert await reader.owners.header("ses_new", fresh) is None
    await own(store, 1, "w1", "ses_new")
    assert await reader.owners.header("ses_new", fresh) is None


async def test_a_stream_that_was_made_anew_has_other_owners(store: Bus, connect) -> None:  # type: ignore[no-untyped-def]
    reader = Foreign(await connect("gateway"))
    for _ in range(20):
        await own(store, 1, "w9", "ses_other")
    for epoch in range(1, 4):
        await own(store, epoch, f"w{epoch}")
    assert await reader.owners.header(SESSION, await chunk(store, 0, 3, "w3")) is not None
    await store.jetstream().delete_stream(CHUNKS)
    await make_stream(store)
    await own(store, 3, "w3")
    assert await reader.owners.header(SESSION, await chunk(store, 1, 3, "w3")) is not None
    assert await reader.owners.header(SESSION, await chunk(store, 2, 2, "w2")) is None


async def test_a_former_owner_is_known_before_its_successor_writes(store: Bus, connect) -> None:  # type: ignore[no-untyped-def]
    gateway = await connect("gateway")
    reader = Foreign(gateway)
    heard = asyncio.Event()

    async def hear(_: object) -> None:
        heard.set()

    await reader.owners.listen()
    await gateway.client.subscribe(OWN.live(SESSION), cb=hear)
    await gateway.flush()
    await own(store, 1, "w1")
    assert await reader.owners.header(SESSION, await chunk(store, 0, 1, "w1")) is not None
    heard.clear()
    await own(store, 2, "w2")
    async with asyncio.timeout(30):
        await heard.wait()
    assert await reader.owners.header(SESSION, await chunk(store, 1, 1, "w1")) is None
    assert await reader.owners.header(SESSION, await chunk(store, 1, 2, "w2")) is not None

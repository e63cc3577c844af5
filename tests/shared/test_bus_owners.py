"""The entries of a chunk log that its session's owners wrote, by the entries of `own.<session>`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from nats.js import api

from tests.helpers.chunk_headers import chunk_header
from tests.helpers.other_versions import NEWER, OLDER, of_version
from tests.shared.conftest import Connect
from turboserve.bus import Bus, Owners, append, last_entry
from turboserve.bus.log import Entry
from turboserve.contracts.chunks import HEADER, Ownership
from turboserve.contracts.errors import UnavailableError
from turboserve.ids import new_id
from turboserve.subjects import CHUNK, CHUNK_UNNAMED, CHUNKS, OWN

pytestmark = pytest.mark.usefixtures("patient_reads")
SESSION = "ses_a"
KEPT = 8
"""Entries that the stream keeps of one subject."""


@pytest.fixture
async def store(connect: Connect) -> AsyncIterator[Bus]:
    bus = await connect("admin")
    await make_stream(bus)
    yield bus
    await bus.jetstream().delete_stream(CHUNKS)


async def make_stream(bus: Bus) -> None:
    await bus.jetstream().add_stream(
        api.StreamConfig(
            name=CHUNKS,
            subjects=[OWN.every, CHUNK.every],
            # Its name is used again, and files of a stream may be deleted after the broker has answered.
            storage=api.StorageType.MEMORY,
            max_msgs_per_subject=KEPT,
            allow_direct=True,
            republish=api.RePublish(src=">", dest="live.>"),
        )
    )


class Foreign:
    """A reader's owners, and the number of entries that no owner wrote."""

    def __init__(self, bus: Bus) -> None:
        self.count = 0
        self.owners = Owners(bus, self._one)

    def _one(self) -> None:
        self.count += 1


async def own(bus: Bus, epoch: int, worker: str | None, session: str = SESSION) -> int:
    body = Ownership(session=session, epoch=epoch, worker=worker).to_bytes()
    return (await append(bus, OWN.of(session), body, message_id=new_id("own"))).sequence


async def chunk(
    bus: Bus,
    index: int,
    epoch: int,
    worker: str,
    session: str = SESSION,
    *,
    by: str | None = None,
    began: int | None = None,
    unnamed: bool = False,
) -> Entry:
    """Append without the fence, on the subject of `worker` or of another one, `by`.

    With `unnamed`, append as a worker of an earlier version.
    """
    header = chunk_header(session, index, epoch, worker, began=began)
    subject = CHUNK_UNNAMED.of(session) if unnamed else CHUNK.by(session, by or worker)
    await append(bus, subject, b"video", message_id=new_id("test"), headers=header.to_headers())
    entry = await last_entry(bus, CHUNKS, subject)
    assert entry is not None
    return entry


async def test_only_the_owner_at_an_entrys_place_has_written_it(store: Bus, connect: Connect) -> None:
    reader = Foreign(await connect("gateway"))
    early = await chunk(store, 0, 1, "w1")
    await own(store, 1, "w1")
    first = await chunk(store, 0, 1, "w1")
    wrong = [await chunk(store, 4, 1, "w2"), await chunk(store, 4, 2, "w1"), await chunk(store, 4, 0, "w1")]
    await own(store, 2, "w2")
    second = await chunk(store, 1, 2, "w2")
    former = await chunk(store, 2, 1, "w1")
    # In the order of the log, and then from the reader's memory in reverse order.
    for entries in ((early, first, *wrong, second, former), (former, second, *wrong, first, early)):
        reader.count = 0
        for entry in entries:
            header = await reader.owners.header(SESSION, entry, len(entry.data))
            assert (header is not None) == (entry in (first, second)), entry.headers[HEADER]
        assert reader.count == 5


async def test_the_newest_chunk_is_found_behind_what_no_owner_wrote(store: Bus, connect: Connect) -> None:
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
    await append(store, CHUNK.by(SESSION, "w1"), b"", message_id=new_id("test"), headers={HEADER: "{}"})
    found = await reader.owners.newest(SESSION)
    assert found is not None
    assert (found[0].index, found[0].worker) == (2, "w1")
    oldest = await reader.owners.first(SESSION, 1)
    assert oldest is not None
    assert oldest[0].index == 0


async def test_a_session_with_more_owners_than_the_log_keeps(store: Bus, connect: Connect) -> None:
    """Chunks of owners whose entry is gone still count.

    No worker can write such a chunk for a new session.
    """
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


async def test_a_stream_that_was_made_anew_has_other_owners(store: Bus, connect: Connect) -> None:
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


async def test_a_former_owner_is_known_before_its_successor_writes(store: Bus, connect: Connect) -> None:
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
    async with asyncio.timeout(60):
        await heard.wait()
    assert await reader.owners.header(SESSION, await chunk(store, 1, 1, "w1")) is None
    assert await reader.owners.header(SESSION, await chunk(store, 1, 2, "w2")) is not None


async def test_an_entry_counts_only_on_the_subject_of_its_owners_identity(
    store: Bus, connect: Connect
) -> None:
    reader = Foreign(await connect("gateway"))
    await own(store, 1, "wk1_a")
    mine = await chunk(store, 0, 1, "wk1_a")
    assert mine.subject == f"chunk.{SESSION}.wk1"
    assert await reader.owners.header(SESSION, mine) is not None
    for by in ("wk2_a", "wk", "wk11"):
        assert await reader.owners.header(SESSION, await chunk(store, 1, 1, "wk1_a", by=by)) is None
    # Another worker of the owner's identity is no owner either.
    assert await reader.owners.header(SESSION, await chunk(store, 1, 1, "wk1_b")) is None
    assert reader.count == 4


FORGED_HEADERS = (
    {"Status": "404", "Description": "Message Not Found"},
    {"Status": "503"},
    {"Status": "408"},
    {"Nats-Subject": f"chunk.{SESSION}.w1", "Nats-Sequence": "999", "Nats-Last-Sequence": "999"},
)


@pytest.mark.parametrize("forged", FORGED_HEADERS, ids=["none", "no server", "bad request", "the broker's"])
async def test_headers_of_an_entry_do_not_pass_for_the_brokers(
    store: Bus, connect: Connect, forged: dict[str, str]
) -> None:
    """Incident: a stored message with the headers of the broker's answers ended the log for a reader."""
    reader = Foreign(await connect("worker"))
    await own(store, 1, "w1")
    first = await chunk(store, 0, 1, "w1")
    headers = {**{name: first.headers[name] for name in (HEADER,)}, **forged}
    for body in (b"", b"no video"):
        await append(store, CHUNK.by(SESSION, "w2"), body, message_id=new_id("test"), headers=headers)
    last = await chunk(store, 1, 1, "w1")
    await append(store, CHUNK.by(SESSION, "w2"), b"", message_id=new_id("test"), headers=headers)
    found = await reader.owners.newest(SESSION)
    assert found is not None
    assert found[1].sequence == last.sequence
    found = await reader.owners.first(SESSION, first.sequence + 1)
    assert found is not None
    assert found[1].sequence == last.sequence


async def test_the_entries_of_others_displace_nothing_and_cost_little_to_skip(
    store: Bus, connect: Connect
) -> None:
    reader = Foreign(await connect("gateway"))
    await own(store, 1, "w1")
    entries = []
    for index in range(KEPT):
        entries.append(await chunk(store, index, 1, "w1", began=0))
        for name in ("w2", "w3"):
            for _ in range(3):
                await chunk(store, index + 4, 1, "w1", by=name)
    for found, index in (
        (await reader.owners.newest(SESSION), KEPT - 1),
        (await reader.owners.first(SESSION, 1), 0),
        (await reader.owners.oldest(SESSION), 0),
        (await reader.owners.first(SESSION, entries[3].sequence + 1), 4),
    ):
        assert found is not None
        assert found[0].index == index
        assert found[1].sequence == entries[index].sequence
    # Each of these met at most one, however many there are.
    assert reader.count <= 4
    assert await reader.owners.strangers(SESSION, {"w1", "w2", "w3"}) == {"w2", "w3"}


async def test_after_a_migration_away_and_back_the_oldest_is_behind_what_is_missing(
    store: Bus, connect: Connect
) -> None:
    """The broker drops the oldest of one identity's entries, even if another's are older still."""
    reader = Foreign(await connect("gateway"))

    async def stint(epoch: int, worker: str, indices: range) -> None:
        await own(store, epoch, worker)
        for index in indices:
            await chunk(store, index, epoch, worker, began=indices.start)

    async def oldest() -> tuple[int, list[int]]:
        found = await reader.owners.oldest(SESSION)
        assert found is not None
        return found[0].index, [header.index async for header, _ in reader.owners.stints(SESSION)]

    await stint(1, "w1", range(3))
    await stint(2, "w2", range(3, 6))
    await stint(3, "w3", range(6, 6))
    await stint(4, "w1", range(6, 11))
    assert await oldest() == (0, [6, 3, 0])
    # The last of its first stint is removed: 3 to 5 have no chunk before them, but none is missing after.
    for index in range(11, 14):
        await chunk(store, index, 4, "w1", began=6)
    assert await oldest() == (3, [6, 3])
    # Chunk 6 is removed, and 5 has none behind it.
    await chunk(store, 14, 4, "w1", began=6)
    assert await oldest() == (7, [7])
    first = await reader.owners.first(SESSION, 1)
    assert first is not None
    assert first[0].index == 3


async def test_chunks_of_versions_without_identities_stay_readable(store: Bus, connect: Connect) -> None:
    jetstream = store.jetstream()
    config = (await jetstream.stream_info(CHUNKS)).config
    await jetstream.update_stream(config.evolve(subjects=[OWN.every, CHUNK_UNNAMED.every]))
    await own(store, 1, "w1")
    for index in range(4):
        await chunk(store, index, 1, "w1", unnamed=True)
    await jetstream.update_stream(config)
    with pytest.raises(UnavailableError):
        await append(store, CHUNK_UNNAMED.of(SESSION), b"", message_id=new_id("test"))

    reader = Foreign(await connect("gateway"))
    newest = await reader.owners.newest(SESSION)
    assert newest is not None
    assert newest[0].index == 3
    await own(store, 2, "w2")
    for index in range(4, 7):
        await chunk(store, index, 2, "w2", began=4)
    newest, found, position = await reader.owners.newest(SESSION), [], 1
    while (entry := await reader.owners.first(SESSION, position)) is not None:
        found.append(entry[0].index)
        position = entry[1].sequence + 1
    assert newest is not None
    assert (newest[0].index, found) == (6, list(range(7)))
    oldest = await reader.owners.oldest(SESSION)
    assert oldest is not None
    assert oldest[0].index == 0
    assert [header.index async for header, _ in reader.owners.stints(SESSION)] == [4, 0]
    for index in range(7, 7 + KEPT):
        await chunk(store, index, 2, "w2", began=4)
    oldest = await reader.owners.oldest(SESSION)
    assert oldest is not None
    assert oldest[0].index == 7
    assert reader.count == 0


async def test_an_owner_of_a_newer_major_version_stops_the_reader(store: Bus) -> None:
    foreign = Foreign(store)
    first = await own(store, 1, "wk1_a")
    await chunk(store, 0, 1, "wk1_a")
    found = await foreign.owners.newest(SESSION)
    assert found is not None
    await own_of_version(store, NEWER, 2, "wk2_b")
    foreign.owners.changed(SESSION)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="update this process"):
            await foreign.owners.newest(SESSION)
        with pytest.raises(UnavailableError, match="update this process"):
            await foreign.owners.strangers(SESSION, {"wk1", "wk9"})
    assert list(store.incompatible) == ["state-store"]
    assert foreign.count == 0
    assert first > 0


async def test_an_owner_of_an_older_major_version_is_none_until_it_is_written_again(
    store: Bus,
) -> None:
    foreign = Foreign(store)
    await own_of_version(store, OLDER, 1, "wk1_a")
    await chunk(store, 0, 1, "wk1_a")
    assert await foreign.owners.newest(SESSION) is None
    assert foreign.count > 0
    await own(store, 1, "wk1_a")
    second = await chunk(store, 1, 1, "wk1_a")
    foreign.owners.changed(SESSION)
    found = await foreign.owners.newest(SESSION)
    assert found is not None
    assert (found[0].index, found[1].sequence) == (1, second.sequence)
    assert not store.incompatible


async def own_of_version(bus: Bus, version: str, epoch: int, worker: str) -> None:
    body = of_version(Ownership(session=SESSION, epoch=epoch, worker=worker), version)
    await append(bus, OWN.of(SESSION), body, message_id=new_id("own"))

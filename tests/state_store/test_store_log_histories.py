"""What the log keeps of a session whose chunks are on the subjects of several identities."""

from __future__ import annotations

import asyncio

import pytest

from tests.helpers.waiting import eventually
from tests.state_store.state_store_harness import Harness
from turboserve.bus import Owners, append, next_entry
from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.sessions import SessionRecord
from turboserve.ids import new_id
from turboserve.state_store.log_histories import LogHistories
from turboserve.state_store.settings import Settings
from turboserve.subjects import CHUNK, CHUNKS

KEPT = 10


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"chunks_kept": KEPT, "log_chunks_floor": 8})


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the store from trimming, which it could do at any time: these tests trim."""

    async def never(_: LogHistories) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(LogHistories, "run", never)


@pytest.fixture
def histories(api: Harness, settings: Settings) -> LogHistories:
    return LogHistories(api.bus, Owners(api.bus, lambda: None), settings)


async def placed(api: Harness, identity: str, record: SessionRecord | None = None) -> SessionRecord:
    """Place the session, or a new one, on a new worker of `identity`."""
    worker = new_id(identity)
    await api.renew(worker, "migrated")
    record = await api.get(record.id) if record else await api.create("migrated")
    return await api.place(record, worker)


async def make(api: Harness, record: SessionRecord, began: int, count: int) -> None:
    for index in range(began, began + count):
        await api.chunk(record, index, began=began)


async def forge(api: Harness, record: SessionRecord, worker: str, count: int) -> None:
    """Append copies of the owner's newest chunk, on the subject of another identity."""
    found = await Owners(api.bus, lambda: None).newest(record.id)
    assert found is not None
    header: ChunkHeader = found[0]
    for number in range(count):
        headers = header.model_copy(update={"index": header.index + number}).to_headers()
        await append(api.bus, CHUNK.by(record.id, worker), b"x", message_id=new_id("x"), headers=headers)


async def in_log(api: Harness, session: str) -> list[tuple[str, int]]:
    """Return (identity, index) of all chunks of the session, in the log's order."""
    found: list[tuple[str, int]] = []
    position = 1
    while (entry := await next_entry(api.bus, CHUNKS, CHUNK.of(session), position)) is not None:
        header = ChunkHeader.from_headers(entry.headers)
        found.append((CHUNK.identity(entry.subject) or "", header.index))
        position = entry.sequence + 1
    return found


async def test_a_session_that_migrates_on_and_on_keeps_less_than_twice_the_limit(
    api: Harness, histories: LogHistories
) -> None:
    record = await placed(api, "wk0")
    session, began = record.id, 0
    for stint in range(1, 8):
        await make(api, record, began, 7)
        began += 7
        await histories.trim()
        kept = [index for _, index in await in_log(api, session)]
        assert kept == list(range(kept[0], began))
        assert min(began, KEPT) <= len(kept) < 2 * KEPT
        record = await placed(api, f"wk{stint % 4}", record)


async def test_what_others_append_is_removed_and_displaces_nothing(
    api: Harness, histories: LogHistories
) -> None:
    record = await placed(api, "wk0")
    await make(api, record, 0, KEPT)
    for worker in ("wk7_x", "wk8_x"):
        await forge(api, record, worker, 3 * KEPT)
    assert {identity for identity, _ in await in_log(api, record.id)} == {"wk0", "wk7", "wk8"}
    await histories.trim()
    assert await in_log(api, record.id) == [("wk0", index) for index in range(KEPT)]
    # A former owner's identity displaces its own chunks at most.
    record = await placed(api, "wk1", record)
    await make(api, record, KEPT, 6)
    await forge(api, record, "wk0_later", KEPT)
    await histories.trim()
    assert [index for identity, index in await in_log(api, record.id) if identity == "wk1"] == [
        *range(KEPT, KEPT + 6)
    ]


async def test_a_session_that_migrated_loses_its_oldest_chunks_for_room_and_leaves_no_gap(
    api: Harness, histories: LogHistories
) -> None:
    """Incident: cut identity by identity, chunks in the middle were removed and older ones were kept."""
    record = await placed(api, "wk0")
    session, began = record.id, 0
    for identity in ("wk1", "wk0", "wk2"):
        await make(api, record, began, 3)
        began += 3
        record = await placed(api, identity, record)
    await make(api, record, began, 3)
    for keep in (10, 5, 2):
        subjects = {CHUNK.by(session, f"{identity}_x") for identity, _ in await in_log(api, session)}
        await histories.shorten(session, subjects, keep)
        assert [index for _, index in await in_log(api, session)] == list(range(12 - keep, 12))


async def test_a_subject_that_is_a_pattern_removes_nothing(api: Harness, histories: LogHistories) -> None:
    """The broker accepts `*` as a token in the subject of a message."""
    record = await placed(api, "wk0")
    await make(api, record, 0, KEPT)
    for subject in (f"chunk.{record.id}.*", "chunk.*.wk7", f"chunk.{record.id}.>", "chunk.*.*"):
        for _ in range(KEPT):
            await api.bus.client.publish(subject, b"x")
    await api.bus.flush()
    await histories.trim()
    counts = await histories._purge.chunk_counts()
    assert counts[record.id] == {CHUNK.by(record.id, "wk0_a"): KEPT}
    assert not [
        subject for subjects in counts.values() for subject in subjects if "*" in subject or ">" in subject
    ]


async def test_a_history_within_the_limit_stays_whole(api: Harness, histories: LogHistories) -> None:
    record = await placed(api, "wk0")
    await make(api, record, 0, 4)
    record = await placed(api, "wk1", record)
    await make(api, record, 4, KEPT - 4)
    await histories.trim()
    assert await in_log(api, record.id) == [
        *(("wk0", index) for index in range(4)),
        *(("wk1", index) for index in range(4, KEPT)),
    ]


async def test_an_ended_session_leaves_nothing_of_any_identity(api: Harness, histories: LogHistories) -> None:
    record = await placed(api, "wk0")
    await make(api, record, 0, 4)
    record = await placed(api, "wk1", record)
    await make(api, record, 4, 4)
    await forge(api, record, "wk7_x", 3)

    async def purged() -> bool:
        await histories._purge.sessions([record.id])
        return not await in_log(api, record.id)

    await eventually(purged)
    await histories.trim()

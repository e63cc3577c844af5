"""Bounded streams on a real broker: their size, what is removed for room and what never is."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from nats.js import api as js
from nats.js.errors import NotFoundError
from sqlalchemy import text

from tests.helpers.waiting import eventually
from tests.state_store.state_store_harness import Harness, Machine, Store, no_fence
from turboserve import subjects
from turboserve.bus import Bus, Owners, append, last_entry, next_entry
from turboserve.cli.embedded import Layout, NatsServer, Ports
from turboserve.clock import SystemClock
from turboserve.contracts.canaries import SpaceLevel
from turboserve.contracts.chunks import ChunkHeader, Ownership
from turboserve.contracts.errors import LogFullError, LogUnavailableError
from turboserve.contracts.sessions import SessionRecord
from turboserve.ids import new_id
from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.log_histories import LogHistories
from turboserve.state_store.log_space import LogSpace
from turboserve.state_store.publish.canaries import Canaries
from turboserve.state_store.settings import Settings
from turboserve.state_store.streams import Streams
from turboserve.subjects import CHUNK, CHUNKS, EVENT, EVENTS, OWN

CHUNK_BYTES = 64 * 1024
LOG_BYTES = 5 * 2**20


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(
        update={
            "log_max_bytes": LOG_BYTES,
            "log_chunks_share": 0.8,
            "log_events_share": 0.02,
            "log_chunks_floor": 8,
            "log_guard_s": 0.001,
            "canary_interval_s": 0.2,
            "canary_timeout_s": 60.0,
            "worker_timeout_s": 3_600.0,
        }
    )


@pytest.fixture
async def start_store(
    start_store: Callable[..., Awaitable[Store]], settings: Settings
) -> Callable[..., Awaitable[Store]]:
    """Start stores on streams without messages: those of earlier tests could take all the room."""
    bus = await Bus.connect("admin", settings)
    for name in (CHUNKS, EVENTS):
        with suppress(NotFoundError):
            await bus.jetstream().purge_stream(name)
    await bus.close()
    return start_store


async def append_chunk(api: Harness, record: SessionRecord, index: int, size: int = CHUNK_BYTES) -> bool:
    """Append as the record's owner. Returns False if there is no room. Raises FencedError."""
    try:
        await api.chunk(record, index, bytes(size))
    except LogFullError:
        return False
    return True


async def append_patiently(api: Harness, record: SessionRecord, index: int) -> None:
    async def done() -> bool:
        return await append_chunk(api, record, index)

    await eventually(done)


async def chunks_in_log(api: Harness, record: SessionRecord) -> int:
    info = await api.bus.jetstream().stream_info(CHUNKS, subjects_filter=CHUNK.of(record.id))
    return sum((info.state.subjects or {}).values())


async def fill(api: Harness) -> float:
    info = await api.bus.jetstream().stream_info(CHUNKS)
    assert info.config.max_bytes
    return info.state.bytes / info.config.max_bytes


async def owner_in_log(api: Harness, record: SessionRecord) -> int:
    entry = await last_entry(api.bus, CHUNKS, OWN.of(record.id))
    return Ownership.from_bytes(entry.data).epoch if entry else 0


async def test_finished_sessions_make_room_oldest_first_then_old_chunks_and_fences_stay(
    api: Harness, store: Store
) -> None:
    finished = [await api.running(f"finished{n}") for n in range(3)]
    for record in finished:
        for index in range(10):
            assert await append_chunk(api, record, index)
        await api.end(record.id)
    suspended = await api.running("asleep")
    for index in range(10):
        assert await append_chunk(api, suspended, index)
    suspended = await api.pause(suspended.id)
    live = await api.running("live", capacity=1)
    # 30 chunks of finished sessions are 47 % of the stream, and 10 of the suspended one 16 %.
    index = 0
    while await chunks_in_log(api, finished[0]):
        await append_patiently(api, live, index)
        index += 1
        assert index < 30
    index -= 1
    await eventually(lambda: store.runtime.warnings().get("log_space") is None)
    # The chunks of the session that ended last stay as long as the older ones make enough room.
    assert await chunks_in_log(api, finished[2]) == 10
    assert await chunks_in_log(api, suspended) == 10
    assert await chunks_in_log(api, live) == index + 1
    # Only live sessions are left in the end. Their oldest chunks are removed, down to the floor.
    last = index + 120
    while index < last:
        index += 1
        await append_patiently(api, live, index)
    assert await chunks_in_log(api, finished[2]) == 0
    assert await fill(api) < 1
    assert 8 <= await chunks_in_log(api, live) < 100
    assert 8 <= await chunks_in_log(api, suspended) <= 10
    newest = await last_entry(api.bus, CHUNKS, CHUNK.of(live.id))
    assert newest is not None
    assert ChunkHeader.from_headers(newest.headers).index == index
    # Live sessions kept their fence, ended ones lost it.
    assert await owner_in_log(api, live) == live.epoch
    assert await owner_in_log(api, suspended) == suspended.epoch
    assert [await owner_in_log(api, record) for record in finished] == [0, 0, 0]

    async def resumed() -> bool:
        # Refused while the log is full, until the store has checked it again.
        with suppress(LogUnavailableError):
            return not (await api.resume(suspended.id)).phase.ended
        return False

    await eventually(resumed)
    await api.end(live.id)
    await api.end(suspended.id)


async def test_nothing_is_admitted_when_only_floors_are_left_and_again_when_one_ends(
    api: Harness, store: Store
) -> None:
    sessions = [await api.running(f"crowd{n}", capacity=2) for n in range(6)]
    # Six floors of 8 chunks are less than the stream; six of 10 are not.
    full = False
    for index in range(24):
        for record in sessions:
            full = full or not await append_chunk(api, record, 1_000 + index)
        if full:
            break

    async def refused() -> bool:
        try:
            record = await api.create("crowd0")
        except LogUnavailableError as error:
            return error.code == "log_unavailable" and error.retry_after_s is not None
        await api.end(record.id)
        return False

    numbers = itertools.count(2_000)

    async def refused_when_full() -> bool:
        # Fill the stream with the chunks that every floor keeps, and repeat it, because the store makes room
        # meanwhile.
        for record in sessions:
            for _ in range(8):
                await append_chunk(api, record, next(numbers), 2 * CHUNK_BYTES)
        warning = store.runtime.warnings().get("log_space", "")
        return warning.startswith(("scarce", "full")) and await refused()

    await eventually(refused_when_full)
    owners = [await owner_in_log(api, record) for record in sessions]
    assert owners == [record.epoch for record in sessions]
    for record in sessions[:3]:
        await api.end(record.id)

    async def admitted() -> bool:
        return not await refused()

    await eventually(admitted)
    for record in sessions[3:]:
        assert await owner_in_log(api, record) == record.epoch
        await append_patiently(api, record, 3_000)
        await api.end(record.id)


async def test_old_events_make_room_and_the_newest_stay(api: Harness, store: Store) -> None:
    jetstream = api.bus.jetstream()
    config = (await jetstream.stream_info(EVENTS)).config
    assert config.max_bytes == int(0.02 * LOG_BYTES)
    record = await api.running("events")
    for number in range(75):
        await api.prompt(record.id, f"{number}:" + "x" * 1_990)

    async def published() -> bool:
        entry = await last_entry(api.bus, EVENTS, EVENT.of(record.id))
        return entry is not None and b'"74:x' in entry.data

    # 150 KB go through a stream of 105 KB, by an outbox that retries until there is room.
    await eventually(published)
    info = await jetstream.stream_info(EVENTS)
    assert info.state.bytes <= config.max_bytes
    assert info.state.first_seq > 1
    await api.end(record.id)
    # The next test's sessions are admitted.
    await eventually(lambda: store.runtime.warnings().get("log_space") is None)


async def test_sessions_that_no_row_knows_make_room(api: Harness, store: Store) -> None:
    unknown = await api.running("unknown")
    for index in range(10):
        assert await append_chunk(api, unknown, index)
    database = PostgresDatabase(_settings_of(store))
    try:
        async with database.transaction() as db:
            await db.connection.execute(text("delete from sessions where id = :id"), {"id": unknown.id})
    finally:
        await database.close()
    live = await api.running("known")
    index = 0
    while await chunks_in_log(api, unknown):
        await append_patiently(api, live, index)
        index += 1
        assert index < 70

    async def purged() -> bool:
        # Its fence is removed after its chunks.
        return await owner_in_log(api, unknown) == 0

    await eventually(purged)
    assert await owner_in_log(api, live) == live.epoch
    await api.end(live.id)


def _settings_of(store: Store) -> Settings:
    assert isinstance(store.runtime.settings, Settings)
    return store.runtime.settings


@asynccontextmanager
async def broker(
    layout: Layout, ports: Ports, tmp_path: Path, name: str, max_store_bytes: int
) -> AsyncIterator[tuple[NatsServer, Machine]]:
    server = NatsServer(
        layout.server(name),
        ports.get(name),
        {user: layout.secret(f"nats.{user}") for user in (*subjects.SERVICES, "admin")},
        max_store_bytes,
    )
    server.directory.mkdir(parents=True, exist_ok=True)
    machine = Machine(server, tmp_path / f"{name}.log")
    await machine.start()
    try:
        yield server, machine
    finally:
        await machine.stop()


async def test_what_no_owner_wrote_makes_room_before_live_sessions_lose_anything(
    start_store: Any, settings: Settings
) -> None:
    # The test makes room itself, with nothing appended meanwhile: the store's own checks are far apart.
    seldom = {"canary_interval_s": 3_600.0, "canary_timeout_s": 7_200.0}
    store = await start_store(**seldom)
    async with Harness.connected(settings) as api, log_space(api, store) as space:
        live = await api.running("live", capacity=1)
        for index in range(40):
            assert await append_chunk(api, live, index, 1_000)
        for _ in range(3):
            await forge_until_full(api, live)
            assert await space.check() is SpaceLevel.ENOUGH
            first = await next_entry(api.bus, CHUNKS, CHUNK.by(live.id, live.worker or ""), 1)
            assert first is not None
            assert ChunkHeader.from_headers(first.headers).index == 0
        assert await append_chunk(api, live, 40)


@asynccontextmanager
async def log_space(api: Harness, store: Store) -> AsyncIterator[LogSpace]:
    """The part as the store has it, with connections of its own."""
    settings, clock = _settings_of(store), store.runtime.clock
    database = PostgresDatabase(settings)
    histories = LogHistories(api.bus, Owners(api.bus, lambda: None), settings)
    try:
        canaries = Canaries(api.bus, clock, settings)
        yield LogSpace(database, api.bus, clock, canaries, histories, settings)
    finally:
        await database.close()


async def forge_until_full(api: Harness, live: SessionRecord) -> None:
    """Append copies of the session's newest chunk, on the subject of an identity that never owned it."""
    entry = await last_entry(api.bus, CHUNKS, CHUNK.by(live.id, live.worker or ""))
    assert entry is not None
    headers = {name: value for name, value in entry.headers.items() if not name.startswith("Nats-")}
    subject = CHUNK.by(live.id, "wk7_x")
    forged = 0
    with suppress(LogFullError):
        while True:
            await append(api.bus, subject, bytes(CHUNK_BYTES), message_id=new_id("x"), headers=headers)
            forged += 1
    assert forged > 0.9 * 0.8 * LOG_BYTES / CHUNK_BYTES - 1


async def test_streams_of_an_earlier_version_get_a_size_in_place(
    layout: Layout, ports: Ports, tmp_path: Path
) -> None:
    limit = 48 * 2**20
    async with broker(layout, ports, tmp_path, "sized", limit) as (server, machine):
        settings = Settings(nats_url=server.url("state-store"), request_deadline_s=10.0)
        bus = await Bus.connect("state-store", settings)
        admin = await Bus.connect("state-store", settings.model_copy(update={"nats_url": server.url()}))
        try:
            old: dict[str, Any] = {"storage": js.StorageType.FILE, "duplicate_window": 120.0}
            jetstream = admin.jetstream()
            await jetstream.add_stream(name=CHUNKS, subjects=["own.*", "chunk.*"], **old)
            await jetstream.add_stream(name=EVENTS, subjects=["event.*", "worker-event.*"], **old)
            await jetstream.publish("own.before", b"{}")
            await jetstream.publish("chunk.before", b"video")

            streams = Streams(bus, SystemClock(), settings, no_fence)
            await streams.ensure_with_retry()
            sizes: dict[str, int] = {}
            for name in (CHUNKS, EVENTS):
                info = await jetstream.stream_info(name)
                assert info.config.discard == js.DiscardPolicy.NEW
                assert not info.config.discard_new_per_subject
                assert info.config.max_bytes is not None
                sizes[name] = info.config.max_bytes
            # As much as this broker reserves, or one step less.
            assert 0.6 * limit < sum(sizes.values()) <= limit
            assert sizes[CHUNKS] > 8 * sizes[EVENTS]
            assert (await jetstream.stream_info(CHUNKS)).state.messages == 2

            # With less room at the next start, the reservation stays, and the streams do not change.
            await machine.stop()
            server._max_store_bytes = limit // 2
            await machine.start()
            await eventually(lambda: bus.connected and admin.connected)
            await streams.ensure_with_retry()
            for name, size in sizes.items():
                assert (await jetstream.stream_info(name)).config.max_bytes == size
            # With more room they grow.
            await machine.stop()
            server._max_store_bytes = 4 * limit
            await machine.start()
            await eventually(lambda: bus.connected and admin.connected)
            await streams.ensure_with_retry()
            for name, size in sizes.items():
                assert ((await jetstream.stream_info(name)).config.max_bytes or 0) > 2 * size
        finally:
            await bus.close()
            await admin.close()


async def test_what_a_broker_at_its_own_limit_refuses_is_an_error_to_try_again(
    layout: Layout, ports: Ports, tmp_path: Path
) -> None:
    async with broker(layout, ports, tmp_path, "limited", 2**20) as (server, _):
        settings = Settings(nats_url=server.url())
        bus = await Bus.connect("state-store", settings)
        try:
            await bus.jetstream().add_stream(name="PLAIN", subjects=["chunk.*"])

            async def flood() -> None:
                for number in range(40):
                    await append(bus, "chunk.s", bytes(60_000), message_id=str(number))

            with pytest.raises(LogFullError) as caught:
                await flood()
            assert caught.value.retry_after_s is not None
        finally:
            await bus.close()


def test_a_data_folder_keeps_the_size_that_its_streams_have_reserved(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, 1, {})
    first = server.store_limit()
    assert first > 0
    (tmp_path / "max_file_store").write_text(str(10 * first))
    assert server.store_limit() == 10 * first
    (tmp_path / "max_file_store").write_text("1")
    assert server.store_limit() == pytest.approx(first, rel=0.2)


async def test_a_session_beyond_the_limit_of_its_own_chunks_still_drops_its_oldest(
    start_store: Any, settings: Settings
) -> None:
    await start_store(chunks_kept=8, log_chunks_floor=8)
    async with Harness.connected(settings) as api:
        record = await api.running("ring")
        for index in range(20):
            await append_patiently(api, record, index)
        assert await chunks_in_log(api, record) == 8
        assert await owner_in_log(api, record) == record.epoch
        await api.end(record.id)

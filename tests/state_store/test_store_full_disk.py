"""A disk that is full and gets room again, on small disks of the tests' own; and a Redis out of memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio
from pydantic import SecretStr

from tests.helpers.waiting import eventually
from tests.state_store.state_store_harness import PATIENT, Harness, Store, machine
from turboserve import subjects
from turboserve.bus import next_entry
from turboserve.cli.embedded import Layout, NatsServer, Ports, PostgresServer, RedisServer
from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.errors import LogUnavailableError, TurboServeError, UnavailableError
from turboserve.contracts.sessions import SessionRecord
from turboserve.experiments.chaos.small_disk import SmallDisk, why_not
from turboserve.state_store.settings import Settings
from turboserve.subjects import CHUNK, CHUNKS
from turboserve.tasks import stop

OUTAGES = True
CHUNK_BYTES = 48 * 1024
MIB = 2**20


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SmallDisk]:
    """A disk of the test's own, of as many bytes as its parameter."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with SmallDisk(tmp_path / "disk", request.param) as disk:
        yield disk


async def write_for_ever(
    api: Harness, record: SessionRecord, acked: list[int], writes: asyncio.Event
) -> None:
    """Act as a worker while `writes` is set: repeat each chunk until the log has it."""
    while True:
        await writes.wait()
        index = len(acked)
        try:
            data = index.to_bytes(4, "big") * (CHUNK_BYTES // 4)
            await api.chunk(record, index, data, deadline_s=1.0)
            acked.append(index)
        except UnavailableError:
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.01)


async def indices(api: Harness, record: SessionRecord) -> list[int]:
    """Return the indices of the session's chunks in the log. Checks the contents of each."""
    found: list[int] = []
    sequence = 0
    while entry := await next_entry(api.bus, CHUNKS, CHUNK.of(record.id), sequence + 1):
        index = ChunkHeader.from_headers(entry.headers).index
        assert entry.data == index.to_bytes(4, "big") * (CHUNK_BYTES // 4)
        found.append(index)
        sequence = entry.sequence
    return found


async def refused(api: Harness, model: str) -> TurboServeError | None:
    try:
        # Large, so that a few of them need new blocks.
        record = await api.create(model, prompt="x" * 2_000)
        await api.end(record.id)
    except TurboServeError as error:
        return error
    return None


@pytest.mark.parametrize("disk", [64 * MIB], indirect=True)
async def test_a_log_whose_disk_was_full_goes_on_without_loss_or_repeat(
    redis_url: str, postgres_url: str, layout: Layout, ports: Ports, tmp_path: Path, disk: SmallDisk
) -> None:
    server = NatsServer(
        disk.path / "nats",
        ports.get("full-nats"),
        {user: layout.secret(f"nats.{user}") for user in (*subjects.SERVICES, "admin")},
    )
    settings = Settings(
        nats_url=server.url(),
        redis_url=SecretStr(redis_url),
        postgres_url=SecretStr(postgres_url),
        sweep_s=0.2,
        worker_timeout_s=3_600.0,
        canary_interval_s=0.3,
        canary_timeout_s=3.0,
        log_directory=server.directory,
        # A live session's oldest chunks make room too, while the broker can still remove them.
        chunks_kept=10_000,
        log_chunks_floor=10_000,
        **PATIENT,
    )
    async with (
        machine(server, tmp_path) as nats,
        Store.running(settings) as store,
        Harness.connected(settings) as api,
    ):
        record = await api.running("full", capacity=8)
        acked: list[int] = []
        writes = asyncio.Event()
        writes.set()
        writer = asyncio.create_task(write_for_ever(api, record, acked, writes))

        async def admits() -> bool:
            return await refused(api, "full") is None

        try:
            await eventually(lambda: len(acked) > 5)
            # On a busy machine it would fill the disk by itself.
            writes.clear()
            await eventually(lambda: store.runtime.checks()["log_chunks"])
            await eventually(lambda: store.runtime.warnings() == {})
            await eventually(admits)

            # Announced while everything still works: a tenth of the disk is left, then less.
            disk.fill(5 * MIB)
            await eventually(lambda: "log_space" in store.runtime.warnings())
            assert store.runtime.warnings()["log_space"].startswith("low")
            await eventually(lambda: store.runtime.checks()["log_chunks"])

            writes.set()
            disk.fill()

            async def refuses() -> bool:
                return isinstance(await refused(api, "full"), LogUnavailableError)

            await eventually(refuses)
            await eventually(lambda: not store.runtime.checks()["log_chunks"])
            before = len(acked)
            error = await refused(api, "full")
            assert isinstance(error, LogUnavailableError)
            assert error.retry_after_s is not None
            # Requests that need no room in the log still take effect, and are published later.
            receipt = await api.prompt(record.id, "while nothing is stored")
            assert receipt.control_seq == 1

            disk.free()
            # The broker has switched its storage off for good: its supervisor restarts it.
            await nats.stop()
            await nats.start()
            await eventually(lambda: len(acked) > before + 5)
            writes.clear()
            await eventually(
                lambda: all(
                    ok for name, ok in store.runtime.checks().items() if name.startswith(("log_", "str"))
                )
            )
            await eventually(admits)
        finally:
            await stop(writer)
        found = await indices(api, record)
        assert found == list(range(found[0], found[0] + len(found)))
        assert found[0] == 0
        # An append whose answer was lost may be in the log and not be counted here.
        assert len(acked) <= len(found) <= len(acked) + 1
        events = await api.until_events(record.id, "session.created", "session.placed", "prompt.accepted")
        assert len({event.id for event in events}) == 3
        assert not store.runtime.stopping.is_set()


@pytest.mark.parametrize("disk", [160 * MIB], indirect=True)
async def test_a_postgres_whose_disk_was_full_is_waited_for(
    nats_url: str, redis_url: str, layout: Layout, ports: Ports, tmp_path: Path, disk: SmallDisk
) -> None:
    server = PostgresServer(
        disk.path / "postgres",
        ports.get("full-postgres"),
        "admin",
        "secret",
        ("fsync=off", "full_page_writes=off"),
    )
    settings = Settings(
        nats_url=nats_url,
        redis_url=SecretStr(redis_url),
        postgres_url=SecretStr(server.url()),
        sweep_s=0.2,
        worker_timeout_s=3_600.0,
        **PATIENT,
    )
    async with (
        machine(server, tmp_path),
        Store.running(settings) as store,
        Harness.connected(settings) as api,
    ):
        record = await api.running("full-rows", capacity=8)
        await eventually(lambda: store.runtime.checks()["postgres"])
        disk.fill()
        # The server answers reads, and may still change a row. Only a write of new blocks reveals the fault.
        await eventually(lambda: not store.runtime.checks()["postgres"])

        async def all_typed() -> bool:
            """Create rows until there is no page left for one."""
            for _ in range(20):
                error = await refused(api, "full-rows")
                if error is not None:
                    return isinstance(error, UnavailableError) and error.retry_after_s is not None
            return False

        await eventually(all_typed)
        disk.free()
        await eventually(lambda: store.runtime.checks()["postgres"])

        async def works() -> bool:
            return await refused(api, "full-rows") is None

        await eventually(works)
        assert (await api.get(record.id)).epoch == record.epoch
        assert not store.runtime.stopping.is_set()


async def test_a_redis_that_takes_no_writes_is_said_and_done_without(
    nats_url: str, postgres_url: str, layout: Layout, ports: Ports, tmp_path: Path
) -> None:
    server = RedisServer(layout.server("full-redis"), ports.get("full-redis"), layout.secret("full-redis"))
    settings = Settings(
        nats_url=nats_url,
        redis_url=SecretStr(server.url),
        postgres_url=SecretStr(postgres_url),
        worker_timeout_s=3_600.0,
        canary_timeout_s=60.0,
        **PATIENT,
    )
    async with (
        machine(server, tmp_path),
        Store.running(settings) as store,
        Harness.connected(settings) as api,
        redis.asyncio.Redis.from_url(server.url) as client,
    ):
        record = await api.running("hot", capacity=8)

        async def known() -> bool:
            return (await api.get(record.id)).unwatched_s is not None

        async def unknown() -> bool:
            return not await known()

        await eventually(lambda: "redis" not in store.runtime.warnings())
        await eventually(known)
        await client.config_set("maxmemory-policy", "noeviction")
        await client.config_set("maxmemory", "1")
        await eventually(lambda: "memory" in store.runtime.warnings().get("redis", ""))
        # Viewers are no longer known, so no session is suspended or ended for lack of viewers.
        await eventually(unknown)
        assert await refused(api, "hot") is None
        assert store.runtime.checks()["postgres"]
        await client.config_set("maxmemory", "0")
        await eventually(lambda: "redis" not in store.runtime.warnings())
        await eventually(known)

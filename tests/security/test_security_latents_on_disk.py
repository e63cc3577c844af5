"""Latents outlive Redis and everything around it. A full disk costs latents and nothing else."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
from pydantic import SecretStr

from tests.helpers.virtual_clock import VirtualClock
from tests.helpers.waiting import eventually
from tests.state_store.state_store_harness import Machine
from turboserve.cli.embedded import Layout, Ports, RedisServer
from turboserve.clock import SystemClock
from turboserve.contracts.chunks import LatentsHeader
from turboserve.contracts.errors import NotFoundError
from turboserve.contracts.requests import GetLatents
from turboserve.experiments.chaos.small_disk import SmallDisk, why_not
from turboserve.state_store.hot import redis as hot_redis
from turboserve.state_store.hot.probe import watching_since
from turboserve.state_store.hot.redis import RedisStore
from turboserve.state_store.hot.session_state import HotStoreGuard, Latents, Playheads
from turboserve.state_store.settings import Settings

DISK_BYTES = 32 << 20
LATENTS_BYTES = 1 << 20
SESSION = "ses_1"


PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the deadline, so that a busy Redis does not count as unavailable."""
    monkeypatch.setattr(hot_redis, "DEADLINE_S", PATIENCE_S)


class Store:
    """The state store's side of one Redis."""

    def __init__(self, server: RedisServer, machine: Machine) -> None:
        self.server, self.machine = server, machine
        self.hot = HotStoreGuard(RedisStore(Settings(redis_url=SecretStr(server.url))), SystemClock())
        self.latents = Latents(self.hot, kept=4, ttl_s=3_600)

    async def keep(self, index: int) -> None:
        header = LatentsHeader(
            session=SESSION, index=index, epoch=1, dtype="float16", shape=(3, 4, 4, 4), first_latent=3 * index
        )
        await self.latents.keep(header, bytes([index]) * LATENTS_BYTES)

    async def has(self, index: int) -> bool:
        try:
            header, data = await self.latents.get(GetLatents(session=SESSION, index=index))
        except NotFoundError:
            return False
        assert (header.index, data) == (index, bytes([index]) * LATENTS_BYTES)
        return True

    def kept(self, index: int) -> Callable[[], Awaitable[bool]]:
        """Return a condition: a chunk's latents are kept, with a new attempt each time."""

        async def try_it() -> bool:
            await self.keep(index)
            return await self.has(index)

        return try_it

    async def is_written(self) -> bool:
        """Return whether Redis has written everything.

        During a sync of its file it holds writes up to 2 s.
        """
        persistence = await self.hot.attempt(lambda store: cast(RedisStore, store)._redis.info("persistence"))
        return persistence is not None and persistence["aof_buffer_length"] == 0

    def there(self, index: int) -> Callable[[], Awaitable[bool]]:
        async def look() -> bool:
            return await self.has(index)

        return look


async def opened(folder: Path) -> AsyncIterator[Store]:
    layout = Layout(folder)
    layout.create()
    server = RedisServer(layout.server("redis"), Ports(layout.ports).get("redis"), layout.secret("redis"))
    machine = Machine(server, layout.logs / "redis.log")
    await machine.start()
    store = Store(server, machine)
    try:
        yield store
    finally:
        await store.hot.close()
        await machine.stop()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async for one in opened(tmp_path / "data"):
        yield one


async def test_latents_outlive_a_redis_that_is_killed_and_one_that_is_stopped(store: Store) -> None:
    """Incident: they were in memory alone, so sessions started from empty context after a full restart."""
    for index in range(8):
        await eventually(store.kept(index))
    await eventually(store.is_written)
    await store.machine.kill()
    await store.machine.start()
    await eventually(store.there(7))
    assert [await store.has(index) for index in range(9)] == [True] + 3 * [False] + 4 * [True] + [False]
    await store.machine.stop()
    await store.machine.start()
    await eventually(store.there(7))
    # The latents of an ended session are deleted for good.
    await store.latents.forget(SESSION)
    await eventually(store.is_written)
    await store.machine.kill()
    await store.machine.start()
    # Redis answers: otherwise there would be no latents either.
    await eventually(store.is_written)
    assert not await store.has(7)


async def test_what_redis_kept_over_a_restart_does_not_say_that_it_was_watching(store: Store) -> None:
    """Otherwise sessions would end as abandoned for a time in which no client could watch them."""
    clock = VirtualClock()
    since = await watching_since(store.hot, clock)
    assert since is not None
    clock.advance(3_600.0)
    assert await watching_since(store.hot, clock) == since
    await store.machine.kill()
    await store.machine.start()

    async def anew() -> bool:
        return await watching_since(store.hot, clock) == clock.wall()

    await eventually(anew)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with SmallDisk(tmp_path / "disk", DISK_BYTES) as disk:
        yield disk.path


@pytest.fixture
async def store_on_disk(disk: Path) -> AsyncIterator[Store]:
    async for one in opened(disk / "data"):
        yield one


async def test_a_full_disk_costs_new_latents_until_there_is_room_again(
    disk: Path, store_on_disk: Store
) -> None:
    store = store_on_disk
    await eventually(store.kept(0))
    filler = disk / "filler"
    with filler.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            file.truncate(file.tell() & ~0xFFFF)
    pid = store.server.pid_file.read_text()

    chunks = itertools.count(1)

    async def refused() -> bool:
        index = next(chunks)
        await store.keep(index)
        return not await store.has(index)

    await eventually(refused)
    # It answers, still has its data, and is not restarted for a fault that a restart does not repair.
    assert await store.has(0)
    assert not store.hot.backing_off
    await store.server.probe()
    playheads = Playheads(store.hot, VirtualClock())
    await playheads.flush()

    # Killed nevertheless, it starts on the full disk with its data.
    await store.machine.kill()
    await store.machine.start()
    pid = store.server.pid_file.read_text()
    await eventually(store.there(0))
    await eventually(refused)

    filler.unlink()
    freed = time.monotonic()
    last = next(chunks)
    await eventually(store.kept(last))
    print(f"kept again after {time.monotonic() - freed:.2f} s")
    assert store.server.pid_file.read_text() == pid
    await store.machine.kill()
    await store.machine.start()
    await eventually(store.there(last))
    assert await store.has(0)

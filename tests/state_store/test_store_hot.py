"""Latents and playheads in a real Redis and in memory."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

import pytest
import redis
from pydantic import SecretStr

import turboserve.state_store.hot.redis
import turboserve.state_store.hot.session_state
from tests.helpers.other_versions import NEWER, OLDER, of_version
from tests.helpers.virtual_clock import VirtualClock
from tests.helpers.waiting import eventually
from tests.state_store.state_store_harness import LIMIT_S
from turboserve.audience import SILENT_S
from turboserve.clock import SystemClock
from turboserve.contracts.chunks import LatentsHeader
from turboserve.contracts.errors import NotFoundError
from turboserve.contracts.requests import GetLatents
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import Playhead
from turboserve.ids import new_id
from turboserve.simulation.runtime.hot import MemoryHotStore, MemoryRedis
from turboserve.state_store.hot.redis import RedisStore
from turboserve.state_store.hot.session_state import REST_S, HotStoreGuard, Latents, Playheads
from turboserve.state_store.ports.hot import HotStore, HotUnavailableError
from turboserve.state_store.settings import Settings

OUTAGES = True
FROZEN_S = 3.0


@pytest.fixture(params=["redis", "memory"])
def url(request: pytest.FixtureRequest) -> str | None:
    """URL of Redis; None stands for the store in memory."""
    return request.getfixturevalue("redis_url") if request.param == "redis" else None


@pytest.fixture
async def store(url: str | None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HotStore]:
    """The hot store, with a long deadline: a busy machine is only slow."""
    monkeypatch.setattr(turboserve.state_store.hot.redis, "DEADLINE_S", LIMIT_S)
    store: HotStore
    store = MemoryHotStore(MemoryRedis()) if url is None else RedisStore(Settings(redis_url=SecretStr(url)))
    yield store
    await store.close()


@pytest.fixture
def hot(store: HotStore, monkeypatch: pytest.MonkeyPatch) -> HotStoreGuard:
    monkeypatch.setattr(turboserve.state_store.hot.session_state, "ATTEMPT_S", LIMIT_S)
    return HotStoreGuard(store, SystemClock())


def header(session: str, index: int, epoch: int = 1) -> LatentsHeader:
    return LatentsHeader(
        session=session,
        index=index,
        epoch=epoch,
        dtype="float16",
        shape=(3, 16, 8, 8),
        first_latent=3 * index,
    )


async def kept(latents: Latents, session: str, up_to: int) -> list[int]:
    found = []
    for index in range(up_to):
        try:
            answer, _ = await latents.get(GetLatents(session=session, index=index))
        except NotFoundError:
            continue
        assert answer.index == index
        found.append(index)
    return found


async def test_the_newest_latents_and_the_sink_are_kept(hot: HotStoreGuard) -> None:
    latents, session = Latents(hot, kept=4, ttl_s=60), new_id("ses")
    for index in range(20):
        await latents.keep(header(session, index), bytes([index]) * 1_000)
    assert await kept(latents, session, 25) == [0, 16, 17, 18, 19]
    _, data = await latents.get(GetLatents(session=session, index=17))
    assert data == bytes([17]) * 1_000
    await latents.forget(session)
    assert await kept(latents, session, 25) == []


async def test_latents_of_another_major_version_count_as_not_kept(hot: HotStoreGuard) -> None:
    latents, session = Latents(hot, kept=4, ttl_s=60), new_id("ses")
    for index, version in enumerate((OLDER, None, NEWER)):
        value = of_version(header(session, index), version) + b"\nlatents"

        async def keep(store: HotStore, index: int = index, value: bytes = value) -> None:
            await store.keep_latents(f"latents:{session}", index, 1, value, kept=4, ttl_s=60)

        await hot.attempt(keep)
        with pytest.raises(NotFoundError, match=f"schema version {version or 'none'}"):
            await latents.get(GetLatents(session=session, index=index))
    await latents.keep(header(session, 3), b"new")
    assert await kept(latents, session, 6) == [3]


async def test_an_earlier_owners_late_latents_replace_nothing(hot: HotStoreGuard) -> None:
    latents, session = Latents(hot, kept=4, ttl_s=60), new_id("ses")
    await latents.keep(header(session, 5, epoch=2), b"new\nwith a line end")
    await latents.keep(header(session, 5, epoch=1), b"old")
    answer, data = await latents.get(GetLatents(session=session, index=5))
    assert (answer.epoch, data) == (2, b"new\nwith a line end")
    await latents.keep(header(session, 5, epoch=3), b"newer")
    assert (await latents.get(GetLatents(session=session, index=5)))[1] == b"newer"


def row(session: str, updated_at: float) -> SessionRecord:
    return SessionRecord(
        id=session,
        tenant="t",
        model="m",
        prompt="p",
        seed=1,
        phase=Phase.ACTIVE,
        version=1,
        epoch=1,
        created_at=updated_at,
        updated_at=updated_at,
    )


async def test_the_freshest_playhead_wins_across_instances(hot: HotStoreGuard) -> None:
    clock, session = VirtualClock(), new_id("ses")
    first, second = Playheads(hot, clock), Playheads(hot, clock)
    await first.report(Playhead(session=session, playhead_s=1.0, viewers=1), b"")
    await first.flush()
    clock.advance(1.0)
    await second.report(Playhead(session=session, playhead_s=2.0, viewers=1), b"")
    await second.flush()
    clock.advance(1.0)
    for playheads in (first, second):
        [record] = await playheads.onto([row(session, clock.wall() - 100.0)])
        assert record.playhead_s == 2.0
        assert record.unwatched_s == pytest.approx(1.0)


async def test_the_furthest_viewer_of_all_gateways_counts(hot: HotStoreGuard) -> None:
    clock, session = VirtualClock(), new_id("ses")
    playheads = Playheads(hot, clock)
    for gateway, playhead_s, viewers in (("gtw_a", 6.0, 1), ("gtw_b", 2.0, 1), ("gtw_b", 2.0, 0)):
        word = Playhead(session=session, gateway=gateway, playhead_s=playhead_s, viewers=viewers)
        await playheads.report(word, b"")
        assert playheads.known(session) == 6.0
    clock.advance(SILENT_S + 1.0)
    await playheads.report(Playhead(session=session, gateway="gtw_b", playhead_s=2.5, viewers=1), b"")
    assert playheads.known(session) == 2.5


async def test_for_how_long_no_viewer_has_watched(hot: HotStoreGuard) -> None:
    clock, session = VirtualClock(), new_id("ses")
    playheads = Playheads(hot, clock)
    assert await playheads.watched_s(session) is None
    await playheads.report(Playhead(session=session, playhead_s=1.0, viewers=2), b"")
    clock.advance(5.0)
    # A player that has left reports no viewers: the playhead stays, and no viewer watches.
    await playheads.report(Playhead(session=session, playhead_s=1.5, viewers=0), b"")
    await playheads.flush()
    clock.advance(5.0)
    assert await playheads.watched_s(session) == pytest.approx(10.0)
    assert await Playheads(hot, clock).watched_s(session) == pytest.approx(10.0)
    [never_changed] = await playheads.onto([row(session, clock.wall() - 100.0)])
    assert never_changed.playhead_s == 1.5
    assert never_changed.unwatched_s == pytest.approx(10.0)
    [just_resumed] = await playheads.onto([row(session, clock.wall() - 2.0)])
    assert just_resumed.unwatched_s == pytest.approx(2.0)
    [ended] = await playheads.onto([row(session, 0.0).model_copy(update={"phase": Phase.TERMINATED})])
    assert ended.unwatched_s is None


async def test_an_unreachable_redis_is_left_alone_for_a_while() -> None:
    clock = VirtualClock()
    hot = HotStoreGuard(RedisStore(Settings(redis_url=SecretStr("redis://127.0.0.1:1/0"))), clock)
    tries = 0

    async def work(store: HotStore) -> str:
        nonlocal tries
        tries += 1
        await store.probe()
        return "answer"

    for _ in range(5):
        assert await hot.attempt(work) is None
    assert (tries, hot.backing_off) == (1, True)
    clock.advance(REST_S + 0.1)
    assert await hot.attempt(work) is None
    assert tries == 2
    await hot.close()


async def test_a_frozen_server_is_given_up_and_does_later_what_was_sent(url: str | None) -> None:
    memory, key, loop = MemoryRedis(), "", asyncio.get_running_loop()
    store: HotStore = (
        MemoryHotStore(memory) if url is None else RedisStore(Settings(redis_url=SecretStr(url)))
    )

    async def connected() -> bool:
        with suppress(HotUnavailableError):
            await store.probe()
            return True
        return False

    # Commands sent while it is frozen use an existing connection.
    await eventually(connected)
    while True:
        key, until = new_id("k"), loop.time() + FROZEN_S
        with frozen(url, memory):
            try:
                await store.write({key: {"a": 1.0}}, ttl_s=60)
            except HotUnavailableError:
                break
        # A busy machine may write only when the one in memory is no longer frozen.
        assert url is None
        assert loop.time() >= until
    async with asyncio.timeout(60.0):
        while True:
            with suppress(HotUnavailableError):
                if await store.read([key], ["a"]) == [[1.0]]:
                    break
            await asyncio.sleep(0.02)
    await store.close()


@contextmanager
def frozen(url: str | None, memory: MemoryRedis) -> Iterator[None]:
    """Stop Redis meanwhile; freeze the one in memory for `FROZEN_S`."""
    if url is None:
        memory.freeze(FROZEN_S)
        yield
        return
    with redis.Redis.from_url(url) as client:
        pid = client.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_latents_are_one_step_on_the_server(store: HotStore) -> None:
    """Of two writers of one chunk, the one with the later epoch wins, in any order."""
    key = new_id("latents")
    await asyncio.gather(
        *(
            store.keep_latents(key, index, epoch, b"%d" % epoch, kept=3, ttl_s=60)
            for index in range(4)
            for epoch in (2, 9, 5)
        )
    )
    assert [await store.latents(key, index) for index in range(5)] == [b"9"] * 4 + [None]


async def test_a_former_owner_removes_no_latents(store: HotStore) -> None:
    """Incident: with latents far ahead it had all of the current owner's dropped."""
    key = new_id("latents")

    async def keep(index: int, epoch: int, value: bytes) -> None:
        await store.keep_latents(key, index, epoch, value, kept=3, ttl_s=60)

    async def kept() -> dict[int, bytes]:
        values = {index: await store.latents(key, index) for index in range(120)}
        return {index: value for index, value in values.items() if value is not None}

    for index in (0, 97, 99, 100, 101):
        await keep(index, 1, b"old")
    for index in (100, 101):
        await keep(index, 2, b"new")
    assert await kept() == {0: b"old", 99: b"old", 100: b"new", 101: b"new"}
    for index in (50, 100, 102, 108, 10**9):
        await keep(index, 1, b"forged")
    await keep(98, 1, b"late")
    await keep(99, 1, b"forged")
    assert await kept() == {0: b"old", 98: b"late", 99: b"old", 100: b"new", 101: b"new"}
    # Another owner continues from an earlier end of the log; then a gap leaves nothing behind.
    await keep(101, 3, b"newer")
    await keep(110, 3, b"newer")
    assert await kept() == {0: b"old", 110: b"newer"}


async def test_fields_are_merged_and_read_in_the_asked_order(store: HotStore) -> None:
    one, two = new_id("k"), new_id("k")
    await store.write({one: {"a": 1.5, "b": 2.0}, two: {"a": 0.1 + 0.2}}, ttl_s=60)
    await store.write({one: {"b": 3.0}}, ttl_s=60)
    assert await store.read([two, one, new_id("k")], ["b", "a"]) == [
        [None, 0.1 + 0.2],
        [3.0, 1.5],
        [None, None],
    ]
    await store.delete(one)
    assert await store.read([one], ["a"]) == [[None]]


async def test_the_first_value_stays(store: HotStore) -> None:
    key = new_id("k")
    assert await store.first(key, 2.5, ttl_s=60) == 2.5
    assert await store.first(key, 7.0, ttl_s=60) == 2.5
    await store.delete(key)
    assert await store.first(key, 7.0, ttl_s=60) == 7.0
    assert await store.run_id() == await store.run_id()


async def test_what_is_kept_is_dropped_after_its_time(store: HotStore) -> None:
    key, other = new_id("k"), new_id("latents")
    await store.write({key: {"a": 1.0}}, ttl_s=1)
    await store.keep_latents(other, 0, 1, b"x", kept=3, ttl_s=1)
    async with asyncio.timeout(60):
        while await store.read([key], ["a"]) != [[None]] or await store.latents(other, 0) is not None:
            await asyncio.sleep(0.05)

"""The hot store in memory under faults: down, frozen, refusing, restarted with and without what it kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from turboserve.simulation.runtime.hot import MemoryHotStore, MemoryRedis, RedisBehavior
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.state_store.ports.hot import DEADLINE_S, RETRIES, HotRefusedError, HotUnavailableError


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop(seed=1)
    yield loop
    loop.close()


@pytest.fixture(params=[False, True])
def server(loop: VirtualLoop, request: pytest.FixtureRequest) -> MemoryRedis:
    return MemoryRedis(RedisBehavior(immediate=request.param), loop=loop)


@pytest.fixture
def store(server: MemoryRedis) -> MemoryHotStore:
    return MemoryHotStore(server)


def value(loop: VirtualLoop, store: MemoryHotStore) -> float | None:
    return loop.run_until_complete(store.read(["k"], ["a"]))[0][0]


def write(loop: VirtualLoop, store: MemoryHotStore, number: float) -> None:
    loop.run_until_complete(store.write({"k": {"a": number}}, ttl_s=10))


def test_time_to_live(loop: VirtualLoop, store: MemoryHotStore) -> None:
    write(loop, store, 1.0)
    loop.advance(9.0)
    assert value(loop, store) == 1.0
    loop.advance(1.0)
    assert value(loop, store) is None


def test_a_restart_keeps_everything_and_is_another_run(
    loop: VirtualLoop, server: MemoryRedis, store: MemoryHotStore
) -> None:
    write(loop, store, 1.0)
    run = loop.run_until_complete(store.run_id())
    server.crash()
    with pytest.raises(HotUnavailableError):
        write(loop, store, 2.0)
    server.start()
    assert value(loop, store) == 1.0
    assert loop.run_until_complete(store.run_id()) != run
    server.crash()
    server.start(empty=True)
    assert value(loop, store) is None


def test_a_loss_of_power_takes_the_last_second(
    loop: VirtualLoop, server: MemoryRedis, store: MemoryHotStore
) -> None:
    write(loop, store, 1.0)
    loop.advance(2.0)
    write(loop, store, 2.0)
    write(loop, store, 3.0)
    server.crash(power_loss=True)
    server.start()
    assert value(loop, store) == 1.0


def test_a_full_disk_refuses_writes_and_answers_reads(
    loop: VirtualLoop, server: MemoryRedis, store: MemoryHotStore
) -> None:
    write(loop, store, 1.0)
    server.refuses_writes = True
    with pytest.raises(HotRefusedError):
        write(loop, store, 2.0)
    with pytest.raises(HotRefusedError):
        loop.run_until_complete(store.probe())
    assert value(loop, store) == 1.0


def test_a_frozen_server_answers_later(loop: VirtualLoop, server: MemoryRedis, store: MemoryHotStore) -> None:
    server.freeze(5.0)

    async def impatient() -> None:
        async with asyncio.timeout(0.5):
            await store.write({"k": {"a": 1.0}}, ttl_s=10)

    with pytest.raises(TimeoutError):
        loop.run_until_complete(impatient())
    loop.advance(4.5)
    # The command is still executed, once the server continues.
    assert value(loop, store) == 1.0
    assert loop.time() == 5.0


def test_who_waits_for_a_frozen_server_gives_up(
    loop: VirtualLoop, server: MemoryRedis, store: MemoryHotStore
) -> None:
    server.freeze(5.0)
    with pytest.raises(HotUnavailableError):
        write(loop, store, 1.0)
    assert loop.time() == (1 + RETRIES) * DEADLINE_S


@pytest.mark.parametrize("slow_s", [0.5 * DEADLINE_S, 1.5 * DEADLINE_S])
def test_a_slow_server_answers_or_is_given_up(
    loop: VirtualLoop, server: MemoryRedis, store: MemoryHotStore, slow_s: float
) -> None:
    server.slow_down(2.0, slow_s)
    if slow_s > DEADLINE_S:
        with pytest.raises(HotUnavailableError):
            write(loop, store, 1.0)
    else:
        write(loop, store, 1.0)
        assert loop.time() == slow_s
    loop.advance(2.0)
    began = loop.time()
    assert value(loop, store) == 1.0
    assert loop.time() == began

"""A service's connection to the broker through a network that is slow, or that stops in one direction."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from urllib.parse import urlsplit

import nats.errors
import pytest
from nats.aio.msg import Msg

from tests.helpers.broker_scene import Scene
from tests.shared.conftest import client_of
from turboserve.bus import Bus, append, follow
from turboserve.bus.round_trip import SLOW_S, RoundTrip, measure_round_trips
from turboserve.config import Settings
from turboserve.experiments.chaos.network_proxy import UNDISTURBED, NetworkConditions, ProxiedNetwork
from turboserve.subjects import CHUNK, CHUNKS

LIMIT_S = 60.0
PING_S = 0.3
SILENT = NetworkConditions(stops_requests=True)
DEAF = NetworkConditions(stops_answers=True)


@pytest.fixture
def network(nats_url: str) -> Iterator[ProxiedNetwork]:
    with ProxiedNetwork() as network:
        parts = urlsplit(nats_url)
        network.add("broker", lambda: (parts.hostname or "", parts.port or 0))
        yield network


@pytest.fixture
async def bus(nats_url: str, network: ProxiedNetwork) -> AsyncIterator[Bus]:
    parts = urlsplit(nats_url)
    url = parts._replace(netloc=f"{parts.netloc.rpartition(':')[0]}:{network['broker'].port}").geturl()
    bus = await Bus.connect("admin", Settings(nats_url=url, broker_ping_s=PING_S, request_deadline_s=0.5))
    yield bus
    network.set(UNDISTURBED)
    await bus.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.02)


async def fill(bus: Bus) -> None:
    """Publish more than the client's buffers and the kernel's hold."""
    await asyncio.gather(*(bus.client.publish("supervisor.filler", bytes(500_000)) for _ in range(60)))


async def test_a_silent_connection_with_unsent_data_is_left(network: ProxiedNetwork, bus: Bus) -> None:
    """Found with a frozen broker: the client waited until what it had written was sent, which never was."""
    network.set(SILENT)
    filling = asyncio.create_task(fill(bus))
    await until(lambda: not bus.connected)
    # Only new connections work again: the old one stays silent.
    old = network["broker"].connections
    await until(lambda: network["broker"].connections > old)
    network.set(UNDISTURBED)
    await until(lambda: bus.connection is not None and bus.connection > 0)
    await asyncio.wait_for(asyncio.gather(filling, return_exceptions=True), LIMIT_S)
    await bus.flush()


@pytest.mark.parametrize("orderly", [True, False])
async def test_a_request_ends_in_time_where_it_cannot_even_be_sent(
    network: ProxiedNetwork, nats_url: str, orderly: bool
) -> None:
    settings = Settings(nats_url=_through(network, nats_url), broker_ping_s=LIMIT_S)
    bus = await Bus.connect("admin", settings)
    await bus.client.subscribe("supervisor.nothing", cb=asyncio.Queue[Msg]().put)
    await bus.flush()
    network.set(SILENT)
    first = asyncio.create_task(fill(bus))
    await asyncio.sleep(0.1)
    filling = asyncio.gather(first, fill(bus))
    await until(lambda: client_of(bus).pending_data_size > 2 * 2**20)
    with pytest.raises(nats.errors.TimeoutError):
        await asyncio.wait_for(bus.client.request("nobody", b"x", timeout=0.2), LIMIT_S)
    # To close, the client must not wait for what it cannot send either, and must leave nothing behind.
    await asyncio.wait_for(bus.close() if orderly else bus.client.close(), LIMIT_S)
    assert bus.closed.is_set()
    filling.cancel()
    await asyncio.gather(filling, return_exceptions=True)
    await until(lambda: not tasks_of_client())


def tasks_of_client() -> list[str]:
    """Return the tasks that nats-py has not ended."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return [name for name in names if name.startswith(("Client.", "Subscription."))]


async def test_a_caller_that_leaves_a_drain_leaves_no_drain_behind(
    network: ProxiedNetwork, nats_url: str
) -> None:
    bus = await Bus.connect("admin", Settings(nats_url=_through(network, nats_url), broker_ping_s=LIMIT_S))
    network.set(DEAF)
    leaving = asyncio.create_task(bus.client.drain())
    await until(lambda: "Client.drain" in tasks_of_client())
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await until(lambda: "Client.drain" not in tasks_of_client())
    await bus.client.close()


async def test_a_late_answer_to_a_ping_that_was_given_up_ends_nothing(
    network: ProxiedNetwork, nats_url: str
) -> None:
    """Found with a delay above nats-py's limit: the reading task ended, and the client stayed deaf."""
    bus = await Bus.connect("admin", Settings(nats_url=_through(network, nats_url), broker_ping_s=LIMIT_S))
    network.set(DEAF)
    with pytest.raises(nats.errors.FlushTimeoutError):
        await bus.client.flush(1)
    network.set(UNDISTURBED)
    await asyncio.wait_for(bus.client.flush(), LIMIT_S)
    assert bus.connection == 0
    await bus.close()


def _through(network: ProxiedNetwork, url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{parts.netloc.rpartition(':')[0]}:{network['broker'].port}").geturl()


@pytest.mark.parametrize(
    "conditions", [SILENT, DEAF, NetworkConditions(delay_s=SLOW_S)], ids=["silent", "deaf", "slow"]
)
async def test_the_round_trip_shows_each_way_in_which_a_connection_fails(
    network: ProxiedNetwork, bus: Bus, conditions: NetworkConditions
) -> None:
    trip = RoundTrip()
    measuring = asyncio.create_task(measure_round_trips(bus, trip, time.monotonic))
    # On a busy machine an answer may be slow without any fault of the network.
    await until(lambda: trip.seconds(time.monotonic()) > 0 and trip.warning(time.monotonic()) is None)
    network.set(conditions)
    await until(lambda: trip.warning(time.monotonic()) is not None)
    network.set(UNDISTURBED)
    await until(lambda: trip.warning(time.monotonic()) is None)
    measuring.cancel()


def test_a_missing_answer_counts_from_the_first_question() -> None:
    trip = RoundTrip()
    assert (trip.seconds(9.0), trip.warning(9.0)) == (0.0, None)
    trip.asked(10.0)
    trip.answered(10.2)
    assert trip.seconds(99.0) == pytest.approx(0.2)
    assert trip.warning(99.0) is None
    trip.asked(100.0)
    trip.asked(104.0)
    assert trip.seconds(106.0) == pytest.approx(6.0)
    assert trip.warning(106.0) == "no answer for 6.0 s"
    # The first question was lost with its connection: the new connection is fast, and so is readiness.
    trip.asked(109.0)
    trip.answered(109.1)
    assert trip.seconds(109.1) == pytest.approx(0.1)
    assert trip.warning(109.1) is None


def test_a_follower_keeps_up_where_a_question_takes_longer_than_the_next_message() -> None:
    """Found with a delay of 0.5 s between gateway and broker: the follower fell behind without end."""
    scene = Scene(latency_s=0.6)
    scene.connect("state-store")
    scene.connect("gateway")
    scene.make_stream()
    appended: list[float] = []
    got: list[float] = []

    async def write() -> None:
        for number in range(40):
            appended.append(scene.loop.time())
            task = append(scene.buses["state-store"], CHUNK.of("a"), b"x", message_id=str(number))
            scene.spawn("state-store", task)
            await asyncio.sleep(0.75)

    async def read() -> None:
        async for _ in follow(scene.buses["gateway"], CHUNKS, CHUNK.of("a"), CHUNK.live("a")):
            got.append(scene.loop.time())

    scene.spawn("state-store", write())
    scene.loop.advance(2.0)
    scene.spawn("gateway", read())
    scene.loop.advance(40.0)
    scene.close()
    assert len(got) == 40
    lags = [at - sent for at, sent in zip(got, appended, strict=True)]
    # One way to the broker and one to the follower.
    assert max(lags[12:]) < 1.3

"""Faults of the broker in memory and of connections with it, on the virtual loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
from nats.aio.msg import Msg

from tests.helpers.broker_scene import Scene
from turboserve import subjects
from turboserve.bus import Bus, append, follow, last_entry, read, read_headers
from turboserve.bus.client import NoServerError
from turboserve.config import Settings
from turboserve.contracts.errors import DeadlineError, LogFullError, LogUnavailableError, UnavailableError
from turboserve.contracts.requests import Done, DrainWorker
from turboserve.simulation.runtime.broker import FaultyNetwork, MemoryClient, Rates, Storage
from turboserve.simulation.runtime.process import Process
from turboserve.subject_types import Caller
from turboserve.subjects import CHUNK, CHUNKS

NAMES = ("state-store", "autoscaler", "worker", "gateway")


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene(latency_s=0.01)
    for name in NAMES:
        scene.connect(name)
    yield scene
    scene.close()


def serve(scene: Scene, name: str, seen: list[float]) -> None:
    async def answer(_: DrainWorker, __: Caller) -> Done:
        seen.append(scene.loop.time())
        return Done()

    async def start() -> None:
        await scene.buses[name].serve(subjects.DRAIN_WORKER, answer)
        await scene.buses[name].flush()

    scene.run(name, start())


def calling(scene: Scene, deadline_s: float = 1.0) -> Any:
    bus = scene.buses["autoscaler"]
    work = bus.call(subjects.DRAIN_WORKER, DrainWorker(worker="w"), deadline_s=deadline_s)
    return scene.spawn("autoscaler", work)


def putting(scene: Scene, index: int, deadline_s: float = 1.0) -> Any:
    bus = scene.buses["worker"]
    return scene.spawn(
        "worker",
        append(bus, CHUNK.by("a", "w1"), b"%d" % index, message_id=f"a:{index}", deadline_s=deadline_s),
    )


def finish(scene: Scene, task: Any) -> Any:
    return scene.loop.run_until_complete(task)


def elapsed(scene: Scene, since: float) -> float:
    return round(scene.loop.time() - since, 6)


# The broker ends and starts


def test_a_broker_that_starts_again_has_its_streams_and_its_clients(scene: Scene) -> None:
    scene.make_stream(duplicate_window=60)
    seen: list[float] = []
    serve(scene, "state-store", seen)
    # Its own subscription: whether another client is back when it sends is not determined.
    heard = scene.hear("worker", "load.*")
    finish(scene, putting(scene, 0))
    scene.broker.stop()
    assert all(bus.connection == 0 for bus in scene.buses.values())
    scene.loop.advance(1.0)
    assert all(bus.connection is None for bus in scene.buses.values())
    waiting = putting(scene, 1, deadline_s=9.0)
    scene.publish("worker", "load.a", b"while it was away")
    scene.loop.advance(1.0)
    scene.broker.start()
    scene.loop.advance(1.0)
    assert all(bus.connection == 1 for bus in scene.buses.values())
    # Messages written meanwhile are sent now; subscriptions are back.
    assert finish(scene, waiting).sequence == 2
    assert [body for _, body in heard] == [b"while it was away"]
    assert finish(scene, calling(scene)) == Done()
    assert finish(scene, putting(scene, 0)).duplicate


def test_what_was_on_its_way_is_lost_when_the_broker_ends(scene: Scene) -> None:
    scene.make_stream()
    before = putting(scene, 0)
    scene.loop.advance(0.005)
    scene.broker.stop()
    scene.broker.start()
    with pytest.raises(DeadlineError):
        finish(scene, before)
    answered = putting(scene, 1)
    scene.loop.advance(0.015)
    scene.broker.stop()
    scene.broker.start()
    # Written to the client's socket before the end.
    assert finish(scene, answered).sequence == 1


def test_the_client_says_what_happens_to_its_connection(scene: Scene) -> None:
    said: list[str] = []

    async def disconnected() -> None:
        said.append("disconnected")

    async def reconnected() -> None:
        said.append(f"reconnected {client.stats['reconnects']}")

    async def closed() -> None:
        said.append("closed")

    async def failed(error: Exception) -> None:
        said.append(type(error).__name__)

    async def connect() -> MemoryClient:
        return await scene.broker.connect(
            reconnect_time_wait=0.4,
            disconnected_cb=disconnected,
            reconnected_cb=reconnected,
            closed_cb=closed,
            error_cb=failed,
        )

    client = scene.run("gateway", connect())
    scene.broker.stop()
    scene.loop.advance(1.0)
    scene.broker.start()
    scene.loop.advance(1.0)
    refused = ["ConnectionRefusedError"] * 3
    assert said == ["UnexpectedEOF", "disconnected", *refused, "reconnected 1"]
    scene.run("gateway", client.close())
    assert said[-2:] == ["disconnected", "closed"]
    # The client gave up, so the broker's state no longer matters.
    scene.broker.stop()
    scene.loop.advance(5.0)
    assert said[-1] == "closed"


def test_a_service_that_starts_while_the_broker_is_away_waits_for_it(scene: Scene) -> None:
    scene.broker.stop()
    process = Process("late")
    settings = Settings(nats_url="nats://gateway@memory")
    connecting = scene.loop.spawn(process, Bus.connect("gateway", settings, scene.broker.connect))
    scene.loop.advance(30.0)
    assert not connecting.done()
    scene.broker.start()
    assert scene.loop.run_until_complete(connecting).connected


def test_readers_go_on_after_the_disk_was_lost(scene: Scene) -> None:
    scene.make_stream()
    followed: list[bytes] = []
    read_all: list[bytes] = []
    headers: list[str] = []

    async def follow_on() -> None:
        async for entry in follow(scene.buses["gateway"], CHUNKS, CHUNK.of("a"), CHUNK.live("a")):
            followed.append(entry.data)

    async def read_on() -> None:
        async for entries in read(scene.buses["autoscaler"], [CHUNK], 0):
            read_all.extend(entry.data for entry in entries)

    async def count_on() -> None:
        async for entries in read_headers(scene.buses["state-store"], CHUNKS, [CHUNK.every], 0):
            headers.extend(entry.headers["Nats-Msg-Id"] for entry in entries)

    scene.spawn("gateway", follow_on())
    scene.spawn("autoscaler", read_on())
    scene.spawn("state-store", count_on())
    for index in range(3):
        finish(scene, putting(scene, index))
    scene.loop.advance(10.0)
    scene.broker.stop()
    scene.loop.advance(1.0)
    scene.broker.start(lost_streams=True)
    scene.loop.advance(5.0)
    with pytest.raises(LogUnavailableError):
        finish(scene, putting(scene, 3))
    scene.make_stream()
    for index in range(3, 6):
        assert finish(scene, putting(scene, index)).sequence == index - 2
    scene.loop.advance(60.0)
    # Messages from before the loss was noticed may come twice.
    for found in (followed, read_all):
        assert list(dict.fromkeys(found)) == [b"%d" % index for index in range(6)]
    assert list(dict.fromkeys(headers)) == [f"a:{index}" for index in range(6)]


@pytest.mark.parametrize("refilled", [1, 2, 3, 7])
def test_a_follower_notices_a_lost_end_that_other_messages_have_filled(scene: Scene, refilled: int) -> None:
    """Incident: a viewer waited for chunks at sequences that it had read before the broker lost its end.

    Chunks 1 and 2 are lost. `refilled`: where other messages end; the last of them come after chunk 3.
    """
    scene.make_stream()
    followed: list[bytes] = []
    lost = 0

    async def noticed() -> None:
        nonlocal lost
        lost += 1

    async def follow_on() -> None:
        subject, live = CHUNK.of("a"), CHUNK.live("a")
        async for entry in follow(scene.buses["gateway"], CHUNKS, subject, live, on_lost=noticed):
            followed.append(entry.data)

    def put(session: str, index: int) -> int:
        bus = scene.buses["worker"]
        name = f"{session}:{index}"
        appended = append(bus, CHUNK.by(session, "w1"), b"%d" % index, message_id=name)
        sequence: int = finish(scene, scene.spawn("worker", appended)).sequence
        return sequence

    scene.spawn("gateway", follow_on())
    put("a", 0)
    written_until = scene.loop.time()
    put("a", 1)
    assert put("a", 2) == 3
    scene.loop.advance(10.0)
    scene.broker.stop()
    scene.loop.advance(1.0)
    scene.broker.start(written_until=written_until)
    scene.broker.cut_off(scene.processes["gateway"], 0.5)
    for index in range(1, 7):
        if index == refilled:
            assert put("a", 3) == 1 + refilled
        put("b", index)
    if refilled == 7:
        assert put("a", 3) == 8
    scene.loop.advance(30.0)
    assert lost == 1
    # After the loss, the stream is read from its beginning.
    assert followed == [b"0", b"1", b"2", b"0", b"3"]


def test_a_follower_of_a_broker_that_has_lost_nothing_gets_nothing_twice(scene: Scene) -> None:
    scene.make_stream()
    followed: list[bytes] = []

    async def follow_on() -> None:
        async for entry in follow(scene.buses["gateway"], CHUNKS, CHUNK.of("a"), CHUNK.live("a")):
            followed.append(entry.data)

    scene.spawn("gateway", follow_on())
    for index in range(4):
        finish(scene, putting(scene, index))
        scene.loop.advance(5.0)
        scene.broker.stop()
        scene.loop.advance(1.0)
        scene.broker.start()
        scene.loop.advance(5.0)
    assert followed == [b"%d" % index for index in range(4)]


# Frozen, slow


def test_a_frozen_broker_delivers_nothing_and_then_everything_at_once(scene: Scene) -> None:
    scene.make_stream()
    heard = scene.hear("gateway", "load.*")
    began = scene.loop.time()
    scene.broker.freeze(5.0)
    for index in range(3):
        with pytest.raises(DeadlineError):
            finish(scene, putting(scene, index))
        scene.publish("worker", "load.a", b"%d" % index)
    assert heard == []
    scene.loop.advance(5.0)
    # They took effect after their sender had given them up.
    assert heard == [(round(began + 5.01, 6), b"%d" % index) for index in range(3)]
    assert finish(scene, putting(scene, 1)).duplicate
    assert scene.buses["worker"].connection == 0


def test_a_broker_that_is_frozen_for_long_is_given_up_and_found_again(scene: Scene) -> None:
    scene.make_stream()
    sent = putting(scene, 0, deadline_s=60.0)
    scene.broker.freeze(30.0)
    scene.loop.advance(14.0)
    connected = [scene.buses["worker"].connected]
    scene.loop.advance(3.0)
    connected.append(scene.buses["worker"].connected)
    assert connected == [True, False]
    scene.loop.advance(20.0)
    assert scene.buses["worker"].connection == 1
    # It was in the broker's socket; its acknowledgement went to a closed connection.
    entry = scene.run("gateway", last_entry(scene.buses["gateway"], CHUNKS, CHUNK.of("a")))
    assert entry is not None
    with pytest.raises(DeadlineError):
        finish(scene, sent)


def test_a_slow_broker_takes_longer_for_each(scene: Scene) -> None:
    scene.make_stream()
    finish(scene, putting(scene, 0))
    scene.broker.slow_down(0.3)
    began = scene.loop.time()
    finish(scene, putting(scene, 1))
    assert elapsed(scene, began) == pytest.approx(0.32)
    with pytest.raises(DeadlineError):
        finish(scene, putting(scene, 2, deadline_s=0.2))


# Storage


@pytest.mark.parametrize(
    ("storage", "error"),
    [
        (Storage.FULL, LogFullError),
        (Storage.SILENT, DeadlineError),
        (Storage.OFF, LogUnavailableError),
    ],
)
def test_a_broker_without_room_refuses_appends_and_passes_messages(
    scene: Scene, storage: Storage, error: type[UnavailableError]
) -> None:
    scene.make_stream()
    serve(scene, "state-store", [])
    finish(scene, putting(scene, 0))
    scene.broker.set_storage(storage)
    with pytest.raises(error):
        finish(scene, putting(scene, 1))
    assert finish(scene, calling(scene)) == Done()
    scene.broker.set_storage(Storage.STORES)
    ack = finish(scene, putting(scene, 1))
    assert (ack.sequence, ack.duplicate) == (2, False)


# Partitions


def test_after_a_short_partition_everything_arrives(scene: Scene) -> None:
    heard = scene.hear("gateway", "load.*")
    began = scene.loop.time()
    scene.broker.cut_off(scene.processes["gateway"], 4.0)
    scene.publish("worker", "load.a", b"to it")
    scene.publish("gateway", "load.a", b"from it")
    others = scene.hear("state-store", "load.*")
    scene.loop.advance(3.0)
    assert heard == []
    scene.loop.advance(5.0)
    assert [body for _, body in heard] == [b"to it", b"from it"]
    assert heard[0][0] == pytest.approx(began + 4.0)
    assert [body for _, body in others] == [b"from it"]
    assert scene.buses["gateway"].connection == 0


def test_a_long_partition_breaks_the_connection_and_loses_what_was_on_its_way(scene: Scene) -> None:
    heard = scene.hear("gateway", "load.*")
    store = scene.hear("state-store", "load.*")
    scene.broker.cut_off(scene.processes["gateway"], 25.0)
    scene.publish("worker", "load.a", b"lost")
    scene.publish("gateway", "load.a", b"early")
    scene.loop.advance(17.0)
    assert not scene.buses["gateway"].connected
    scene.publish("gateway", "load.a", b"later")
    scene.loop.advance(20.0)
    assert scene.buses["gateway"].connection == 1
    # Messages sent before were on the old connection, messages sent then on the new one.
    assert [body for _, body in store] == [b"lost", b"early", b"later"]
    assert [body for _, body in heard] == [b"later"]
    scene.publish("worker", "load.a", b"after")
    scene.loop.advance(1.0)
    assert [body for _, body in heard] == [b"later", b"after"]


def test_a_server_that_is_cut_off_still_gets_its_share_of_requests(scene: Scene) -> None:
    """The broker has not noticed yet, so the requester waits for the deadline before it can retry."""
    first: list[float] = []
    second: list[float] = []
    serve(scene, "state-store", first)
    scene.connect("second", "state-store")
    serve(scene, "second", second)
    scene.broker.cut_off(scene.processes["second"], 10.0)
    outcomes = []
    for _ in range(20):
        try:
            finish(scene, calling(scene, deadline_s=0.2))
            outcomes.append("answered")
        except DeadlineError:
            outcomes.append("late")
    assert set(outcomes) == {"answered", "late"}
    assert len(first) == outcomes.count("answered")
    scene.loop.advance(20.0)
    # Requests that their senders had given up long before.
    assert len(second) == outcomes.count("late")


def test_a_server_that_is_frozen_gets_no_requests_once_its_silence_is_noticed(scene: Scene) -> None:
    first: list[float] = []
    second: list[float] = []
    serve(scene, "state-store", first)
    scene.connect("second", "state-store")
    serve(scene, "second", second)
    scene.loop.freeze(scene.processes["second"], 10.0)
    for _ in range(4):
        scene.broker.drop_silent(1.5)
        scene.loop.advance(0.5)
    for _ in range(20):
        finish(scene, calling(scene, deadline_s=0.2))
    assert (len(first), len(second)) == (20, 0)
    scene.loop.advance(20.0)
    assert scene.buses["second"].connection == 1
    # Connected again, it takes its share.
    scene.broker.drop_silent(1.5)
    for _ in range(20):
        finish(scene, calling(scene, deadline_s=0.2))
    assert len(second) > 0


def test_the_broker_hears_of_a_death_behind_a_partition_when_that_ends(scene: Scene) -> None:
    serve(scene, "state-store", [])
    scene.broker.cut_off(scene.processes["state-store"], 5.0)
    scene.loop.kill(scene.processes["state-store"])
    with pytest.raises(DeadlineError):
        finish(scene, calling(scene))
    scene.loop.advance(5.0)
    with pytest.raises(NoServerError):
        finish(scene, calling(scene))


def test_one_connection_breaks(scene: Scene) -> None:
    client = scene.buses["gateway"].client
    assert isinstance(client, MemoryClient)
    heard = scene.hear("gateway", "load.*")
    scene.broker.disconnect_client(client)
    scene.publish("worker", "load.a", b"lost")
    scene.loop.advance(1.0)
    scene.publish("worker", "load.a", b"after")
    scene.loop.advance(1.0)
    assert [body for _, body in heard] == [b"after"]
    assert [bus.connection for bus in scene.buses.values()] == [0, 0, 0, 1]


def test_mending_ends_every_fault(scene: Scene) -> None:
    scene.make_stream()
    scene.broker.freeze(1_000.0)
    scene.broker.cut_off(scene.processes["worker"], 1_000.0)
    scene.broker.set_storage(Storage.FULL)
    scene.broker.slow_down(5.0)
    waiting = putting(scene, 0, deadline_s=20.0)
    scene.loop.advance(9.0)
    scene.broker.repair()
    began = scene.loop.time()
    assert finish(scene, waiting).sequence == 1
    assert elapsed(scene, began) < 0.1


def test_everything_is_read_once_whatever_happened(scene: Scene) -> None:
    """A writer that repeats until it is acknowledged, and a follower, through every fault at once."""
    network = FaultyNetwork(random.Random(11), Rates())
    storm = Scene(network, seed=11)
    for name in NAMES:
        storm.connect(name)
    storm.make_stream(duplicate_window=120)
    network.rates = Rates(0.02, 0.1, 0.2, 0.2, 0.1, 0.1, 0.1, 0.05)
    found: list[bytes] = []
    written = 0

    async def write() -> None:
        nonlocal written
        bus = storm.buses["worker"]
        for index in range(200):
            while True:
                try:
                    await append(
                        bus, CHUNK.by("a", "w1"), b"%d" % index, message_id=f"a:{index}", deadline_s=0.5
                    )
                    break
                except UnavailableError:
                    await asyncio.sleep(0.1)
            written += 1
            await asyncio.sleep(0.1)

    async def follow_on() -> None:
        async for entry in follow(storm.buses["gateway"], CHUNKS, CHUNK.of("a"), CHUNK.live("a")):
            found.append(entry.data)

    storm.spawn("gateway", follow_on())
    writing = storm.spawn("worker", write())
    broker, loop = storm.broker, storm.loop
    for at in range(4, 44, 8):
        loop.call_later(at, broker.stop)
        loop.call_later(at + 1, broker.start)
        loop.call_later(at + 2, broker.freeze, 1.5)
        loop.call_later(at + 4, broker.cut_off, storm.processes["worker"], 1.5)
        loop.call_later(at + 5, broker.cut_off, storm.processes["gateway"], 2.5)
        loop.call_later(at + 6, broker.set_storage, Storage.SILENT)
        loop.call_later(at + 7, broker.set_storage, Storage.STORES)
    loop.run_until_complete(writing)
    network.repair()
    broker.repair()
    loop.advance(10.0)
    assert written == 200
    assert found == [b"%d" % index for index in range(200)]
    storm.close()


def test_headers_and_messages_of_a_subscription_without_a_callback(scene: Scene) -> None:
    async def next_message() -> Msg:
        bus = scene.buses["gateway"]
        subscription = await bus.client.subscribe("load.*")
        await bus.client.publish("load.a", b"x", headers={"A": "b"})
        message: Msg = await subscription.next_msg(timeout=1.0)
        return message

    message = scene.run("gateway", next_message())
    assert (message.data, message.headers) == (b"x", {"A": "b"})

"""The broker in memory on the virtual loop: processes, order, and the network's faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.broker_scene import Scene
from turboserve import subjects
from turboserve.bus import append, follow, last_entry, read_headers
from turboserve.bus.client import NoServerError
from turboserve.contracts.errors import DeadlineError, FencedError
from turboserve.contracts.requests import Done, DrainWorker
from turboserve.simulation.runtime.broker import (
    FaultyNetwork,
    Kind,
    MemoryClient,
    Message,
    MessageOutcome,
    Network,
    Rates,
)
from turboserve.simulation.runtime.broker.network import DOUBLED, LOST, TimedClient
from turboserve.simulation.runtime.process import ProcessDeadError
from turboserve.subject_types import Caller
from turboserve.subjects import CHUNK, CHUNKS, OWN

Choose = Callable[[Kind, Message, bool], MessageOutcome | None]


class Chosen(Network):
    """Each message takes 10 ms, and has the fault that the test chooses."""

    faulty = True

    def __init__(self) -> None:
        super().__init__(0.01)
        self.choose: Choose = lambda _kind, _message, _to_broker: None

    def fate(
        self, client: TimedClient, kind: Kind, message: Message, to_broker: bool
    ) -> MessageOutcome | None:
        return self.choose(kind, message, to_broker)


@pytest.fixture
def network() -> Chosen:
    return Chosen()


@pytest.fixture
def scene(network: Chosen) -> Iterator[Scene]:
    scene = Scene(network)
    for name in ("state-store", "autoscaler", "worker", "gateway"):
        scene.connect(name)
    yield scene
    scene.close()


def serve(scene: Scene, name: str, seen: list[str], takes_s: float = 0.0) -> None:
    async def answer(request: DrainWorker, _: Caller) -> Done:
        seen.append(request.worker)
        await asyncio.sleep(takes_s)
        return Done()

    async def start() -> None:
        await scene.buses[name].serve(subjects.DRAIN_WORKER, answer)
        await scene.buses[name].flush()

    scene.run(name, start())


def call(scene: Scene, worker: str, deadline_s: float = 1.0) -> Done:
    bus = scene.buses["autoscaler"]
    request = DrainWorker(worker=worker)
    return scene.run("autoscaler", bus.call(subjects.DRAIN_WORKER, request, deadline_s=deadline_s))


def put(scene: Scene, index: int, deadline_s: float = 1.0) -> Any:
    work = append(
        scene.buses["worker"],
        CHUNK.by("a", "w1"),
        b"%d" % index,
        message_id=f"a:{index}",
        deadline_s=deadline_s,
        expect=(OWN.of("a"), 0),
    )
    return scene.run("worker", work)


# Calm


def test_messages_take_their_time_and_keep_their_order(scene: Scene) -> None:
    heard = scene.hear("gateway", "load.*")
    began = scene.loop.time()
    scene.publish("worker", "load.a", *(b"%d" % number for number in range(5)))
    scene.loop.advance(1.0)
    assert heard == [(round(began + 0.02, 6), b"%d" % number) for number in range(5)]


def test_a_request_takes_two_ways_there_and_two_back(scene: Scene) -> None:
    serve(scene, "state-store", [])
    call(scene, "first")
    began = scene.loop.time()
    call(scene, "w")
    assert scene.loop.time() - began == pytest.approx(0.04)


def test_random_delays_keep_the_order_of_a_connection_and_not_that_of_two() -> None:
    network = FaultyNetwork(random.Random(3), Rates(delay_s=0.5, lag_s=0.5))
    scene = Scene(network)
    for name in ("first", "second", "gateway"):
        scene.connect(name, "admin")
    heard = scene.hear("gateway", "load.*")
    sent = []
    for number in range(20):
        for name in ("first", "second"):
            sent.append(f"{name} {number}".encode())
            scene.publish(name, "load.a", sent[-1])
    scene.loop.advance(60.0)
    found = [body for _, body in heard]
    assert sorted(found) == sorted(sent)
    for sender in (b"first", b"second"):
        assert [body for body in found if sender in body] == [body for body in sent if sender in body]
    assert found != sent
    scene.close()


# Fates


def test_a_lost_hint_is_lost_for_one_receiver_and_a_doubled_one_comes_twice(
    scene: Scene, network: Chosen
) -> None:
    first, second = scene.hear("gateway", "load.*"), scene.hear("state-store", "load.*")
    fates = iter([LOST, DOUBLED])
    network.choose = lambda kind, _, up: next(fates) if kind is Kind.HINT and not up else None
    scene.publish("worker", "load.a", b"x")
    scene.loop.advance(1.0)
    assert sorted((len(first), len(second))) == [0, 2]


def test_a_lost_request_is_not_seen_and_a_lost_answer_is(scene: Scene, network: Chosen) -> None:
    seen: list[str] = []
    serve(scene, "state-store", seen)
    network.choose = lambda kind, _, up: LOST if kind is Kind.REQUEST and up else None
    with pytest.raises(DeadlineError):
        call(scene, "w1")
    assert seen == []
    network.choose = lambda kind, _, up: LOST if kind is Kind.ANSWER and up else None
    with pytest.raises(DeadlineError):
        call(scene, "w2")
    assert seen == ["w2"]


def test_a_late_request_has_its_effect_after_its_sender_gave_up(scene: Scene, network: Chosen) -> None:
    seen: list[str] = []
    serve(scene, "state-store", seen)
    network.choose = lambda kind, _, up: MessageOutcome(late_s=3.0) if kind is Kind.REQUEST and up else None
    began = scene.loop.time()
    with pytest.raises(DeadlineError):
        call(scene, "late")
    assert (seen, round(scene.loop.time() - began, 6)) == ([], 1.0)
    network.choose = lambda _kind, _message, _up: None
    # Later messages on the same connection overtake it.
    call(scene, "in-time")
    scene.loop.advance(5.0)
    assert seen == ["in-time", "late"]


def test_an_append_whose_acknowledgement_is_lost_is_a_duplicate_when_it_is_repeated(
    scene: Scene, network: Chosen
) -> None:
    scene.make_stream()
    network.choose = lambda kind, _, up: LOST if kind is Kind.ACK else None
    with pytest.raises(DeadlineError):
        put(scene, 0)
    network.choose = lambda _kind, _message, _up: None
    ack = put(scene, 0)
    assert (ack.sequence, ack.duplicate) == (1, True)


def test_an_append_that_is_late_meets_the_fence_of_the_next_owner(scene: Scene, network: Chosen) -> None:
    scene.make_stream()
    store = scene.buses["state-store"]
    network.choose = lambda kind, _, up: (
        MessageOutcome(late_s=3.0) if kind is Kind.APPEND and "chunk" in _.subject else None
    )
    with pytest.raises(DeadlineError):
        put(scene, 0)
    scene.run("state-store", append(store, OWN.of("a"), b"2", message_id="own"))
    scene.loop.advance(5.0)
    assert scene.run("gateway", last_entry(scene.buses["gateway"], CHUNKS, CHUNK.of("a"))) is None
    network.choose = lambda _kind, _message, _up: None
    with pytest.raises(FencedError):
        put(scene, 0)


def test_followers_get_everything_once_though_entries_are_lost_and_doubled(
    scene: Scene, network: Chosen
) -> None:
    scene.make_stream()
    draw = random.Random(5)
    network.choose = lambda kind, _, up: (
        draw.choice((LOST, DOUBLED, None)) if kind is Kind.ENTRY and not up else None
    )
    found: list[bytes] = []
    headers: list[str] = []

    async def follow_on() -> None:
        async for entry in follow(scene.buses["gateway"], CHUNKS, CHUNK.of("a"), CHUNK.live("a")):
            found.append(entry.data)

    async def read_on() -> None:
        async for entries in read_headers(scene.buses["state-store"], CHUNKS, [CHUNK.every], 0):
            headers.extend(entry.headers["Nats-Msg-Id"] for entry in entries)

    scene.spawn("gateway", follow_on())
    scene.spawn("state-store", read_on())
    for index in range(100):
        put(scene, index)
        scene.loop.advance(0.2)
    scene.loop.advance(120.0)
    assert found == [b"%d" % index for index in range(100)]
    assert headers == [f"a:{index}" for index in range(100)]


def test_a_muted_clients_appends_arrive_unacknowledged() -> None:
    network = FaultyNetwork(random.Random(1), Rates())
    scene = Scene(network)
    for name in ("state-store", "worker", "gateway"):
        scene.connect(name)
    scene.make_stream()
    client = scene.buses["worker"].client
    assert isinstance(client, MemoryClient)
    network.mute(client, scene.loop.time() + 10.0)
    with pytest.raises(DeadlineError):
        put(scene, 0)
    # Other clients are answered, and so are the muted client's other requests.
    scene.run("state-store", append(scene.buses["state-store"], OWN.of("b"), b"", message_id="b"))
    entry = scene.run("worker", last_entry(scene.buses["worker"], CHUNKS, CHUNK.of("a")))
    assert entry is not None
    scene.loop.advance(10.0)
    assert put(scene, 0).duplicate
    scene.close()


# Processes


def test_a_killed_process_serves_nothing_and_its_port_is_closed(scene: Scene) -> None:
    seen: list[str] = []
    serve(scene, "state-store", seen, takes_s=0.5)
    store = scene.buses["state-store"]
    said: list[str] = []

    async def resist() -> None:
        try:
            await asyncio.sleep(100.0)
        finally:
            said.append("unwinds")
            await store.client.publish("load.a", b"from the dead")
            said.append("never")

    scene.spawn("state-store", resist())
    heard = scene.hear("gateway", "load.*")
    pending = scene.spawn(
        "autoscaler", scene.buses["autoscaler"].call(subjects.DRAIN_WORKER, DrainWorker(worker="w"))
    )
    scene.loop.advance(0.1)
    scene.loop.kill(scene.processes["state-store"])
    with pytest.raises(NoServerError):
        call(scene, "after")
    with pytest.raises(DeadlineError):
        scene.loop.run_until_complete(pending)
    assert (seen, said, heard) == (["w"], ["unwinds"], [])
    for work in (store.client.publish("a", b""), store.client.request("a"), store.client.flush()):
        with pytest.raises(ProcessDeadError):
            scene.loop.run_until_complete(work)


def test_what_a_process_sent_before_it_was_killed_arrives(scene: Scene) -> None:
    heard = scene.hear("gateway", "load.*")
    scene.publish("worker", "load.a", b"last words")
    scene.loop.kill(scene.processes["worker"])
    scene.loop.advance(1.0)
    assert [body for _, body in heard] == [b"last words"]


def test_a_frozen_process_gets_everything_when_it_runs_again(scene: Scene) -> None:
    heard = scene.hear("gateway", "load.*")
    began = scene.loop.time()
    scene.loop.freeze(scene.processes["gateway"], 8.0)
    for _ in range(3):
        scene.publish("worker", "load.a", b"x")
        scene.loop.advance(1.0)
    assert heard == []
    scene.loop.advance(10.0)
    assert heard == [(round(began + 8.0, 6), b"x")] * 3
    assert scene.buses["gateway"].connection == 0


def test_a_process_that_starts_again_takes_the_place_of_the_one_before(scene: Scene) -> None:
    first: list[str] = []
    second: list[str] = []
    serve(scene, "state-store", first)
    scene.loop.kill(scene.processes["state-store"])
    scene.connect("state-store")
    serve(scene, "state-store", second)
    for number in range(10):
        call(scene, f"w{number}")
    assert (first, len(second)) == ([], 10)


# Reproducibility


def run_scenario(seed: int) -> list[object]:
    """Run hints, requests and appends with all faults. Returns every received message with its time."""
    network = FaultyNetwork(random.Random(seed), Rates())
    scene = Scene(network, seed=seed)
    for name in ("state-store", "autoscaler", "worker", "gateway"):
        scene.connect(name)
    scene.make_stream()
    network.rates = Rates(0.02, 0.05, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 1.0)
    said: list[object] = []

    async def answer(request: DrainWorker, _: Caller) -> Done:
        said.append((scene.loop.time(), "served", request.worker))
        return Done()

    async def ask() -> None:
        for number in range(30):
            try:
                await scene.buses["autoscaler"].call(
                    subjects.DRAIN_WORKER, DrainWorker(worker=f"w{number}"), deadline_s=0.3
                )
                said.append((scene.loop.time(), "answered", number))
            except (DeadlineError, NoServerError) as error:
                said.append((scene.loop.time(), error.code, number))

    async def write() -> None:
        for number in range(30):
            try:
                ack = await append(
                    scene.buses["worker"], CHUNK.by("a", "w1"), b"", message_id=str(number), deadline_s=0.3
                )
                said.append((scene.loop.time(), ack.sequence, ack.duplicate))
            except DeadlineError:
                said.append((scene.loop.time(), "unknown"))

    async def read() -> None:
        async for entry in follow(scene.buses["gateway"], CHUNKS, CHUNK.of("a"), CHUNK.live("a")):
            said.append((scene.loop.time(), "read", entry.sequence))

    scene.spawn("gateway", read())
    scene.spawn("state-store", scene.buses["state-store"].serve(subjects.DRAIN_WORKER, answer))
    scene.spawn("autoscaler", ask())
    scene.spawn("worker", write())
    scene.loop.call_later(2.0, scene.broker.stop)
    scene.loop.call_later(3.0, scene.broker.start)
    scene.loop.call_later(5.0, scene.broker.freeze, 2.0)
    scene.loop.call_later(8.0, scene.broker.cut_off, scene.processes["worker"], 2.0)
    scene.loop.advance(60.0)
    scene.close()
    return said


def test_a_run_is_the_same_each_time_and_another_with_another_seed() -> None:
    assert run_scenario(7) == run_scenario(7)
    assert run_scenario(7) != run_scenario(8)

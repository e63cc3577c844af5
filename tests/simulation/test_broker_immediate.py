"""A network on which messages take no time, and the broker's index of subscriptions."""

from __future__ import annotations

import asyncio
import random

import pytest
from nats.aio.msg import Msg

from tests.helpers.broker_scene import Scene
from turboserve.bus import append
from turboserve.contracts.errors import FencedError, LogFullError, LogUnavailableError
from turboserve.simulation.runtime.broker import Network
from turboserve.simulation.runtime.broker.jetstream import Storage
from turboserve.simulation.runtime.broker.patterns import PatternIndex, matches
from turboserve.subjects import OWN


def test_an_append_on_an_immediate_network_ends_without_a_suspension() -> None:
    scene = Scene(Network(immediate=True))
    bus = scene.connect("state-store")
    scene.make_stream()

    async def send() -> None:
        before = scene.loop.callbacks
        ack = await append(bus, OWN.of("ses_1"), b"first", message_id="m1")
        assert (ack.sequence, scene.loop.callbacks) == (1, before)

    scene.run("state-store", send())
    scene.close()


@pytest.mark.parametrize("immediate", [False, True])
def test_an_acknowledgement_is_the_same_with_and_without_a_message_for_it(immediate: bool) -> None:
    scene = Scene(Network(immediate=immediate))
    bus = scene.connect("state-store")
    scene.make_stream()
    published: list[str] = []
    scene.broker.on_message = lambda subject, _: published.append(subject)
    heard = scene.hear("state-store", "live.own.*")
    subject = OWN.of("ses_1")

    async def send() -> list[object]:
        found: list[object] = []
        for message_id, revision in (("m1", 0), ("m1", 1), ("m2", 0), ("m2", 1)):
            body = message_id.encode()
            try:
                ack = await append(bus, subject, body, message_id=message_id, expect=(subject, revision))
                found.append((ack.sequence, ack.duplicate))
            except FencedError as error:
                found.append(error.detail)
        for storage, error_type in ((Storage.FULL, LogFullError), (Storage.OFF, LogUnavailableError)):
            scene.broker.set_storage(storage)
            with pytest.raises(error_type):
                await append(bus, subject, b"3", message_id="m3")
        return found

    found = scene.run("state-store", send())
    scene.run("state-store", asyncio.sleep(1.0))
    assert found == [(1, False), (1, True), f"{subject}: wrong last sequence: 1", (2, False)]
    assert [body for _, body in heard] == [b"m1", b"m2"]
    assert published == [subject] * 6
    scene.close()


def test_a_frozen_process_reads_an_immediate_message_when_it_continues() -> None:
    scene = Scene(Network(immediate=True))
    sender, receiver = scene.connect("autoscaler"), scene.connect("gateway")
    read_at: list[float] = []

    async def receive(_: Msg) -> None:
        read_at.append(scene.loop.time())

    async def subscribe() -> None:
        await receiver.client.subscribe("news", cb=receive)
        await receiver.flush()

    async def send() -> None:
        await sender.client.publish("news", b"1")

    scene.run("gateway", subscribe())
    process = receiver.client.process  # type: ignore[attr-defined]
    scene.loop.freeze(process, 3.0)
    frozen_at = scene.loop.time()
    scene.run("autoscaler", send())
    assert not read_at
    scene.run("autoscaler", asyncio.sleep(5.0))
    assert read_at == [frozen_at + 3.0]
    scene.close()


@pytest.mark.parametrize("immediate", [False, True])
def test_a_handler_that_waits_or_fails_delays_later_messages_and_loses_none(immediate: bool) -> None:
    scene = Scene(Network(immediate=immediate))
    scene.connect("autoscaler")
    client = scene.connect("gateway").client
    log: list[str] = []

    async def receive(message: Msg) -> None:
        body = message.data.decode()
        log.append(f"{body} begins")
        if body == "slow":
            # Needs a task, as each wait with a limit does.
            async with asyncio.timeout(5.0):
                await asyncio.sleep(1.0)
        if body == "wrong":
            await asyncio.sleep(0.0)
            raise ValueError(body)
        if body == "bad":
            raise ValueError(body)
        if body == "late":
            try:
                async with asyncio.timeout(0.5):
                    await asyncio.sleep(9.0)
            except TimeoutError:
                log.append("late gives up")
        log.append(f"{body} ends")

    async def note(error: Exception) -> None:
        log.append(f"error {error}")

    async def subscribe() -> None:
        client._error_cb = note  # type: ignore[attr-defined]
        await client.subscribe("news", cb=receive)
        await client.flush()

    scene.run("gateway", subscribe())
    scene.publish("autoscaler", "news", b"first", b"slow", b"bad", b"wrong", b"late", b"last")
    scene.loop.advance(5.0)
    waits = ["slow begins", "slow ends", "bad begins", "error bad", "wrong begins", "error wrong"]
    gives_up = ["late begins", "late gives up", "late ends"]
    assert log == ["first begins", "first ends", *waits, *gives_up, "last begins", "last ends"]
    scene.close()


@pytest.mark.parametrize("immediate", [False, True])
def test_a_subscription_that_has_ended_handles_no_message_and_a_drained_one_all(immediate: bool) -> None:
    scene = Scene(Network(immediate=immediate))
    scene.connect("autoscaler")
    client = scene.connect("gateway").client
    handled: list[str] = []

    async def receive(message: Msg) -> None:
        await asyncio.sleep(1.0)
        handled.append(f"{message.subject} {message.data.decode()}")

    async def subscribe() -> None:
        ended = await client.subscribe("ended", cb=receive)
        drained = await client.subscribe("drained", cb=receive)
        await client.flush()
        for subject in ("ended", "drained"):
            for body in (b"1", b"2"):
                await client.publish(subject, body)
        await client.flush()
        await asyncio.sleep(1.5)
        await ended.unsubscribe()
        await drained.drain()  # type: ignore[no-untyped-call]
        assert handled == ["ended 1", "drained 1", "drained 2"]

    scene.run("gateway", subscribe())
    scene.loop.advance(5.0)
    assert len(handled) == 3
    scene.close()


def test_on_an_immediate_network_no_message_overtakes_one_that_a_slow_broker_delays() -> None:
    scene = Scene(Network(immediate=True))
    scene.connect("autoscaler")
    scene.connect("gateway")
    heard = scene.hear("gateway", "news")
    scene.broker.slow_down(0.5)
    scene.publish("autoscaler", "news", b"1")
    scene.broker.slow_down(0.0)
    scene.publish("autoscaler", "news", b"2")
    scene.loop.advance(1.0)
    assert [body for _, body in heard] == [b"1", b"2"]
    scene.close()


def test_the_index_of_patterns_finds_what_matches_after_any_change() -> None:
    chance = random.Random(7)
    index: PatternIndex[int] = PatternIndex()
    known: dict[int, str] = {}
    tokens = ["a", "b", "_INBOX"]
    for number in range(2_000):
        if known and chance.random() < 0.4:
            removed = chance.choice(list(known))
            index.remove(known.pop(removed), removed)
        else:
            ends = [*tokens, "*", ">"] if chance.random() < 0.95 else ["*"]
            pattern = [chance.choice(tokens) for _ in range(chance.randrange(3))] + [chance.choice(ends)]
            known[number] = ".".join(pattern)
            index.add(known[number], number)
        for _ in range(3):
            subject = ".".join(chance.choice(tokens) for _ in range(chance.randrange(1, 4)))
            wanted = {value for value, pattern in known.items() if matches(pattern, subject)}
            assert set(index.match(subject)) == wanted, (subject, known)

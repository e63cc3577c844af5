"""Pull consumers as the state store's reader of headers uses them, on nats-server and in memory."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.errors import NotFoundError

from tests.helpers.waiting import eventually
from tests.shared.conftest import Connect
from turboserve.bus import Bus

LIMIT_S = 60
S = ""
"""Name of the stream, different in each test.

nats-server answers before it has deleted the files of a stream, and a stream of the same name may find them.
"""
_numbers = itertools.count()


@pytest.fixture
async def bus(connect: Connect) -> AsyncIterator[Bus]:
    global S
    S = f"CONSUMED{next(_numbers)}"
    bus = await connect("admin")
    await bus.jetstream().add_stream(
        api.StreamConfig(name=S, subjects=["own.*", "chunk.*"], max_msgs_per_subject=3)
    )
    yield bus
    await bus.jetstream().delete_stream(S)


@pytest.fixture
def jetstream(bus: Bus) -> JetStreamContext:
    return bus.jetstream()


async def consume(jetstream: JetStreamContext, **fields: Any) -> api.ConsumerInfo:
    values: dict[str, Any] = {
        "name": "C",
        "ack_policy": api.AckPolicy.NONE,
        "deliver_policy": api.DeliverPolicy.BY_START_SEQUENCE,
        "opt_start_seq": 1,
        "headers_only": True,
        "filter_subjects": ["chunk.*"],
        "inactive_threshold": 60.0,
        "mem_storage": True,
    }
    return await jetstream.add_consumer(S, api.ConsumerConfig(**(values | fields)))


class Inbox:
    """Messages received for requests."""

    def __init__(self, bus: Bus) -> None:
        self.received: list[Msg] = []
        self.subject = bus.client.new_inbox()
        self._bus = bus

    async def ask(self, consumer: str = "C", **request: Any) -> None:
        if not self.received:
            await self._bus.client.subscribe(self.subject, cb=self._receive)
        if "expires" in request:
            request["expires"] = int(request["expires"] * 1e9)
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{S}.{consumer}"
        await self._bus.client.publish(subject, json.dumps(request).encode(), reply=self.subject)

    async def until(self, count: int) -> list[tuple[Any, ...]]:
        """Return the first `count`: subject, places in stream and consumer, number behind; or a status."""
        await eventually(lambda: len(self.received) >= count, LIMIT_S)
        return [_place(message) for message in self.received]

    async def _receive(self, message: Msg) -> None:
        self.received.append(message)


def _place(message: Msg) -> tuple[Any, ...]:
    headers = message.headers or {}
    if "Status" in headers:
        return headers["Status"], headers.get("Description")
    metadata = message.metadata
    return message.subject, metadata.sequence.stream, metadata.sequence.consumer, metadata.num_pending


async def test_headers_come_in_order_from_a_place_on_the_subjects_asked_for(
    bus: Bus, jetstream: JetStreamContext
) -> None:
    for number, subject in enumerate(("chunk.a", "own.a", "chunk.b", "chunk.a")):
        await jetstream.publish(subject, b"12345", headers={"N": str(number)})
    info = await consume(jetstream, opt_start_seq=2)
    assert (info.name, info.num_pending) == ("C", 2)
    inbox = Inbox(bus)
    await inbox.ask(batch=2)
    assert await inbox.until(2) == [("chunk.b", 3, 1, 1), ("chunk.a", 4, 2, 0)]
    assert [message.data for message in inbox.received] == [b"", b""]
    assert inbox.received[0].headers == {"N": "2", "Nats-Msg-Size": "5"}


async def test_a_request_waits_for_what_comes_and_ends_when_it_is_filled(
    bus: Bus, jetstream: JetStreamContext
) -> None:
    await consume(jetstream, headers_only=False)
    inbox = Inbox(bus)
    await inbox.ask(batch=2, expires=LIMIT_S)
    await bus.flush()
    for number in range(4):
        await jetstream.publish("chunk.a", b"%d" % number)
    assert [place[1] for place in await inbox.until(2)] == [1, 2]
    assert [message.data for message in inbox.received] == [b"0", b"1"]
    await inbox.ask(batch=5, expires=LIMIT_S)
    assert [place[1] for place in (await inbox.until(4))[2:]] == [3, 4]


async def test_a_request_says_that_it_has_ended(bus: Bus, jetstream: JetStreamContext) -> None:
    await consume(jetstream)
    inbox = Inbox(bus)
    await inbox.ask(batch=7, expires=0.2)
    assert await inbox.until(1) == [("408", "Request Timeout")]
    assert (inbox.received[0].headers or {})["Nats-Pending-Messages"] == "7"
    await inbox.ask(batch=7, no_wait=True)
    assert (await inbox.until(2))[1] == ("404", "No Messages")
    await jetstream.publish("chunk.a")
    await inbox.ask(batch=7, no_wait=True)
    assert (await inbox.until(4))[2:] == [("chunk.a", 1, 1, 0), ("404", "No Messages")]
    await inbox.ask(batch=7, no_wait=True, expires=LIMIT_S)
    await bus.flush()
    await jetstream.publish("chunk.a")
    assert (await inbox.until(6))[4:] == [("chunk.a", 2, 2, 0), ("404", "No Messages")]


async def test_a_consumer_that_is_not_there(bus: Bus, jetstream: JetStreamContext) -> None:
    inbox = Inbox(bus)
    await inbox.ask(batch=1, expires=LIMIT_S)
    assert (await inbox.until(1))[0][0] == "503"
    with pytest.raises(NotFoundError):
        await jetstream.consumer_info(S, "C")
    await consume(jetstream)
    assert [info.name for info in await jetstream.consumers_info(S)] == ["C"]
    await inbox.ask(batch=1, expires=LIMIT_S)
    await bus.flush()
    await jetstream.delete_consumer(S, "C")
    assert (await inbox.until(2))[1] == ("409", "Consumer Deleted")
    with pytest.raises(NotFoundError):
        await jetstream.delete_consumer(S, "C")


async def test_messages_that_are_removed_before_their_turn_are_skipped(
    bus: Bus, jetstream: JetStreamContext
) -> None:
    await consume(jetstream)
    for subject in ("chunk.a", "chunk.b", "chunk.a", "chunk.c"):
        await jetstream.publish(subject)
    await jetstream.purge_stream(S, subject="chunk.a")
    assert (await jetstream.consumer_info(S, "C")).num_pending == 2
    inbox = Inbox(bus)
    await inbox.ask(batch=5, no_wait=True)
    assert await inbox.until(3) == [("chunk.b", 2, 1, 1), ("chunk.c", 4, 2, 0), ("404", "No Messages")]


async def test_an_idle_consumer_is_deleted(jetstream: JetStreamContext) -> None:
    assert (await consume(jetstream, inactive_threshold=0.3)).name == "C"
    async with asyncio.timeout(LIMIT_S):
        while await jetstream.consumers_info(S):
            await asyncio.sleep(0.1)


async def test_two_consumers_are_independent(bus: Bus, jetstream: JetStreamContext) -> None:
    await consume(jetstream)
    await consume(jetstream, name="D", opt_start_seq=2)
    for _ in range(2):
        await jetstream.publish("chunk.a")
    first, second = Inbox(bus), Inbox(bus)
    await first.ask("C", batch=2)
    await second.ask("D", batch=2)
    assert [place[1] for place in await first.until(2)] == [1, 2]
    assert [place[:3] for place in await second.until(1)] == [("chunk.a", 2, 1)]

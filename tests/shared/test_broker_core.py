"""The properties of core NATS on which the product relies, on nats-server and in memory."""

from __future__ import annotations

import asyncio
from collections import Counter

import nats.errors
import pytest
from nats.aio.msg import Msg

from tests.helpers.waiting import eventually
from tests.shared.conftest import Connect, client_of
from turboserve.bus import Bus

LIMIT_S = 60


class Heard:
    """Messages of a subscription."""

    def __init__(self) -> None:
        self.messages: list[Msg] = []

    async def receive(self, message: Msg) -> None:
        self.messages.append(message)

    async def until(self, count: int) -> list[bytes]:
        await eventually(lambda: len(self.messages) >= count, LIMIT_S)
        return [message.data for message in self.messages]


async def hear(bus: Bus, subject: str, queue: str = "") -> Heard:
    heard = Heard()
    await bus.client.subscribe(subject, queue=queue, cb=heard.receive)
    await bus.flush()
    return heard


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("a.b", ["a.b"], ["a", "a.c", "a.b.c"]),
        ("a.*", ["a.b", "a.c"], ["a", "a.b.c", "b.b"]),
        ("a.>", ["a.b", "a.b.c"], ["a", "b.a"]),
        ("*.b", ["a.b", "c.b"], ["a.c", "a.b.c", "b"]),
        ("a.*.c", ["a.b.c"], ["a.b.d", "a.c", "a.b.c.d"]),
        ("a.*.>", ["a.b.c", "a.b.c.d"], ["a.b", "a"]),
    ],
)
async def test_patterns(connect: Connect, pattern: str, matching: list[str], others: list[str]) -> None:
    bus = await connect("admin")
    heard = await hear(bus, pattern)
    end = await hear(bus, "end")
    for subject in (*others, *matching):
        await bus.client.publish(subject, subject.encode())
    await bus.client.publish("end")
    await end.until(1)
    assert await heard.until(len(matching)) == [subject.encode() for subject in matching]


async def test_each_receiver_gets_a_publishers_messages_in_order_with_headers(connect: Connect) -> None:
    sender, first, second = await connect("admin"), await connect("admin"), await connect("admin")
    receivers = [await hear(first, "a.*"), await hear(second, "a.>"), await hear(second, "a.x")]
    for number in range(100):
        await sender.client.publish("a.x", b"%d" % number, headers={"N": f" {number} ", "L": "a\r\nb"})
    for heard in receivers:
        assert await heard.until(100) == [b"%d" % number for number in range(100)]
        headers = heard.messages[7].headers
        assert headers is not None
        assert headers["N"] == "7"
        assert "\n" not in headers["L"]
    assert receivers[0].messages[0].reply == ""
    await sender.client.publish("a.x", b"", reply="b.y")
    await receivers[0].until(101)
    assert (receivers[0].messages[100].headers, receivers[0].messages[100].reply) == (None, "b.y")


async def test_callbacks_of_one_subscription_run_one_after_the_other(connect: Connect) -> None:
    bus = await connect("admin")
    running = 0
    most = 0
    done = asyncio.Event()

    async def receive(message: Msg) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        if message.data == b"19":
            done.set()

    await bus.client.subscribe("a", cb=receive)
    for number in range(20):
        await bus.client.publish("a", b"%d" % number)
    async with asyncio.timeout(LIMIT_S):
        await done.wait()
    assert most == 1


async def test_a_queue_group_shares_and_who_is_in_none_hears_all(connect: Connect) -> None:
    sender, first, second = await connect("admin"), await connect("admin"), await connect("admin")
    members = [await hear(first, "work.*", "group"), await hear(second, "work.>", "group")]
    other_group, alone = await hear(second, "work.*", "other"), await hear(first, "work.*")
    for number in range(60):
        await sender.client.publish("work.x", b"%d" % number)
    everything = [b"%d" % number for number in range(60)]
    assert await alone.until(60) == everything
    assert await other_group.until(60) == everything
    await eventually(lambda: sum(len(member.messages) for member in members) >= 60, LIMIT_S)
    shared = Counter(message.data for member in members for message in member.messages)
    assert shared == Counter(everything)
    assert all(member.messages for member in members)


async def test_a_request_without_a_responder_fails_at_once(connect: Connect) -> None:
    bus = await connect("admin")
    started = asyncio.get_running_loop().time()
    with pytest.raises(nats.errors.NoRespondersError):
        await bus.client.request("nobody", timeout=LIMIT_S)
    assert asyncio.get_running_loop().time() - started < LIMIT_S / 2


async def test_a_request_that_is_heard_and_not_answered_times_out(connect: Connect) -> None:
    bus, server = await connect("admin"), await connect("admin")
    heard = await hear(server, "silence")
    with pytest.raises(nats.errors.TimeoutError):
        await bus.client.request("silence", b"?", timeout=0.1)
    await heard.until(1)
    # An answer that comes too late has no receiver.
    await server.client.publish(heard.messages[0].reply, b"late")
    await server.flush()
    answer = asyncio.create_task(bus.client.request("silence", b"!", timeout=LIMIT_S))
    await heard.until(2)
    await server.client.publish(heard.messages[1].reply, b"in time", headers={"A": "b"})
    reply = await answer
    assert (reply.data, reply.headers) == (b"in time", {"A": "b"})


async def test_the_first_of_several_answers_counts(connect: Connect) -> None:
    bus, server = await connect("admin"), await connect("admin")

    async def twice(message: Msg) -> None:
        await message.respond(b"first")
        await message.respond(b"second")

    await server.client.subscribe("twice", cb=twice)
    await server.flush()
    for _ in range(5):
        assert (await bus.client.request("twice", timeout=LIMIT_S)).data == b"first"


async def test_nothing_arrives_after_unsubscribing(connect: Connect) -> None:
    bus = await connect("admin")
    heard = Heard()
    subscription = await bus.client.subscribe("a", cb=heard.receive)
    await bus.client.publish("a", b"1")
    await heard.until(1)
    await subscription.unsubscribe()
    with pytest.raises(nats.errors.NoRespondersError):
        await bus.client.request("a", timeout=LIMIT_S)
    assert len(heard.messages) == 1
    with pytest.raises(nats.errors.BadSubscriptionError):
        await subscription.unsubscribe()


async def test_a_limited_subscription_ends_by_itself(connect: Connect) -> None:
    bus = await connect("admin")
    heard = Heard()
    subscription = await bus.client.subscribe("a", cb=heard.receive)
    await subscription.unsubscribe(limit=2)
    for number in range(5):
        await bus.client.publish("a", b"%d" % number)
    await bus.flush()
    with pytest.raises(nats.errors.NoRespondersError):
        await bus.client.request("a", timeout=LIMIT_S)
    assert await heard.until(2) == [b"0", b"1"]


async def test_what_the_client_refuses_to_send(connect: Connect) -> None:
    bus = await connect("admin")
    with pytest.raises(nats.errors.MaxPayloadError):
        await bus.client.publish("a", bytes(9 * 2**20))
    for subject in ("", "a b", "a\r\nb"):
        with pytest.raises(nats.errors.BadSubjectError):
            await bus.client.publish(subject)
    with pytest.raises(nats.errors.BadSubjectError):
        await bus.client.subscribe("a..b")


async def test_closing_processes_what_has_arrived_and_ends_the_client(connect: Connect) -> None:
    bus, sender = await connect("admin"), await connect("admin")
    heard = Heard()

    async def slowly(message: Msg) -> None:
        await asyncio.sleep(0.01)
        await heard.receive(message)

    await bus.client.subscribe("a", cb=slowly)
    await bus.flush()
    for number in range(10):
        await sender.client.publish("a", b"%d" % number)
    await sender.flush()
    await bus.flush()
    await bus.close()
    assert len(heard.messages) == 10
    assert bus.closed.is_set()
    assert not bus.connected
    with pytest.raises(nats.errors.ConnectionClosedError):
        await bus.client.publish("a")
    with pytest.raises(nats.errors.NoRespondersError):
        await sender.client.request("a", timeout=LIMIT_S)


async def test_subscriptions_outlive_a_reconnect(connect: Connect) -> None:
    bus, sender = await connect("admin"), await connect("admin")
    heard = await hear(bus, "a")
    assert bus.connection == 0
    await client_of(bus).force_reconnect()
    await eventually(lambda: bus.connection == 1, LIMIT_S)
    await bus.flush()
    await sender.client.publish("a", b"after")
    assert await heard.until(1) == [b"after"]


async def test_what_is_sent_without_a_connection_is_sent_later(connect: Connect) -> None:
    bus, listener = await connect("admin"), await connect("admin")
    heard = await hear(listener, "a")
    await client_of(bus).force_reconnect()
    assert not bus.connected
    assert bus.connection is None
    await bus.client.publish("a", b"1")
    request = asyncio.create_task(bus.client.request("a", b"2", timeout=LIMIT_S))
    assert await heard.until(2) == [b"1", b"2"]
    await listener.client.publish(heard.messages[1].reply, b"answer")
    assert (await request).data == b"answer"

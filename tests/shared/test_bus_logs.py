"""Appending to, reading and following logs of a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import api

from tests.shared.conftest import Connect
from turboserve.bus import Bus, append, follow, last_entry, next_entry
from turboserve.contracts.errors import FencedError, UnavailableError
from turboserve.subjects import CHUNK, CHUNKS, OWN

pytestmark = pytest.mark.usefixtures("patient_reads")
LIMIT_S = 120.0

Receive = Callable[[Msg], Awaitable[None]]


@pytest.fixture
async def bus(connect: Connect) -> AsyncIterator[Bus]:
    bus = await connect("admin")
    jetstream = bus.jetstream()
    await jetstream.add_stream(
        api.StreamConfig(
            name=CHUNKS,
            subjects=[OWN.every, CHUNK.every],
            storage=api.StorageType.MEMORY,
            allow_direct=True,
            allow_msg_ttl=True,
            duplicate_window=60,
            republish=api.RePublish(src=">", dest="live.>"),
        )
    )
    yield bus
    await jetstream.delete_stream(CHUNKS)


async def put(bus: Bus, session: str, number: int) -> int:
    ack = await append(bus, CHUNK.by(session, "w1"), b"%d" % number, message_id=f"{session}:{number}")
    return ack.sequence


async def test_a_repeated_append_is_answered_with_the_first_ones_place(bus: Bus) -> None:
    first = await append(bus, CHUNK.by("a", "w1"), b"0", message_id="a:0")
    again = await append(bus, CHUNK.by("a", "w1"), b"0", message_id="a:0")
    assert (first.duplicate, again.duplicate, again.sequence) == (False, True, first.sequence)


async def test_the_fence_lets_the_owner_in_and_keeps_all_others_out(bus: Bus) -> None:
    own = (await append(bus, OWN.of("a"), b"1", message_id="own:a:1", expect=(OWN.of("a"), 0))).sequence
    await append(bus, CHUNK.by("a", "w1"), b"0", message_id="a:0", expect=(OWN.of("a"), own))
    newer = await append(bus, OWN.of("a"), b"2", message_id="own:a:2", expect=(OWN.of("a"), own))
    with pytest.raises(FencedError) as caught:
        await append(bus, CHUNK.by("a", "w1"), b"1", message_id="a:1", expect=(OWN.of("a"), own))
    assert caught.value.field == OWN.of("a")
    await append(bus, CHUNK.by("a", "w1"), b"1", message_id="a:1", expect=(OWN.of("a"), newer.sequence))
    for expected in (0, own, newer.sequence + 100):
        with pytest.raises(FencedError):
            await append(
                bus, OWN.of("a"), b"3", message_id=f"own:a:3:{expected}", expect=(OWN.of("a"), expected)
            )
    with pytest.raises(FencedError):
        await append(bus, CHUNK.by("b", "w1"), b"0", message_id="b:0", expect=(OWN.of("b"), own))
    entry = await last_entry(bus, CHUNKS, CHUNK.of("a"))
    assert entry is not None
    assert (entry.data, entry.headers["Nats-Msg-Id"]) == (b"1", "a:1")


async def test_reading_one_by_one(bus: Bus) -> None:
    places = [await put(bus, "a", number) for number in range(3)]
    await put(bus, "b", 0)
    assert await last_entry(bus, CHUNKS, CHUNK.of("nobody")) is None
    found: list[int] = []
    entry = await next_entry(bus, CHUNKS, CHUNK.of("a"), 0)
    while entry is not None:
        found.append(entry.sequence)
        entry = await next_entry(bus, CHUNKS, CHUNK.of("a"), entry.sequence + 1)
    assert found == places


async def test_a_subject_that_no_stream_takes_is_unavailable(bus: Bus) -> None:
    with pytest.raises(UnavailableError):
        await append(bus, "nowhere.a", b"", message_id="x")


async def follow_until(bus: Bus, session: str, count: int, after: int = 0) -> list[int]:
    found: list[int] = []
    async for entry in follow(bus, CHUNKS, CHUNK.of(session), CHUNK.live(session), after_sequence=after):
        found.append(int(entry.data))
        if len(found) == count:
            break
    return found


async def test_following_joins_past_and_present_without_gap_or_repetition(bus: Bus) -> None:
    places = [await put(bus, "a", number) for number in range(20)]
    whole = asyncio.create_task(follow_until(bus, "a", 60))
    rest = asyncio.create_task(follow_until(bus, "a", 50, after=places[9]))
    for number in range(20, 60):
        await put(bus, "a", number)
        await put(bus, "other", number)
    assert await asyncio.wait_for(whole, LIMIT_S) == list(range(60))
    assert await asyncio.wait_for(rest, LIMIT_S) == list(range(10, 60))


async def test_a_follower_notices_what_was_lost_on_the_way(bus: Bus) -> None:
    """Live messages are delivered at most once: one in three does not arrive here."""
    lossy = bus.client.subscribe

    async def subscribe(subject: str, queue: str = "", *, cb: Receive, **options: Any) -> Subscription:
        async def sometimes(message: Msg) -> None:
            if int(message.data) % 3:
                await cb(message)

        return await lossy(subject, queue, cb=sometimes, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bus.client, "subscribe", subscribe)
        task = asyncio.create_task(follow_until(bus, "lossy", 31))
        for number in range(31):
            await put(bus, "lossy", number)
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(task, LIMIT_S) == list(range(31))


async def test_a_follower_of_several_subjects_notices_what_was_lost_before_another_began(bus: Bus) -> None:
    """A live message names the one before it on its own subject, not the lost one of another identity."""
    lossy = bus.client.subscribe

    async def subscribe(subject: str, queue: str = "", *, cb: Receive, **options: Any) -> Subscription:
        async def sometimes(message: Msg) -> None:
            if int(message.data) % 4 != 3:
                await cb(message)

        return await lossy(subject, queue, cb=sometimes, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bus.client, "subscribe", subscribe)
        task = asyncio.create_task(follow_until(bus, "moved", 33))
        # The last of each stint of four does not arrive here.
        for number in range(33):
            subject = CHUNK.by("moved", f"w{number // 4 % 3}")
            await append(bus, subject, b"%d" % number, message_id=f"moved:{number}")
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(task, LIMIT_S) == list(range(33))


async def test_a_slow_follower_loses_nothing(bus: Bus) -> None:
    found: list[int] = []
    await put(bus, "slow", 0)
    async for entry in follow(bus, CHUNKS, CHUNK.of("slow"), CHUNK.live("slow")):
        found.append(int(entry.data))
        if len(found) == 1:
            for number in range(1, 40):
                await put(bus, "slow", number)
            await asyncio.sleep(0.1)
        if len(found) == 40:
            break
    assert found == list(range(40))

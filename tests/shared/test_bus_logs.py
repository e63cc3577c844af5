"""Appending to, reading and following logs of a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from nats.js import api

from turboserve.bus import Bus, Entry, append, consume, consumer, follow, last_entry, next_entry, read
from turboserve.contracts.errors import FencedError, UnavailableError
from turboserve.contracts.requests import SessionRef
from turboserve.subjects import CHUNK, CHUNKS, OWN
from turboserve.tasks import stop


@pytest.fixture
async def bus(connect) -> AsyncIterator[Bus]:  # type: ignore[no-untyped-def]
    bus = await connect("admin")
    jetstream = bus.jetstream()
    await jetstream.add_stream(
        api.StreamConfig(
            name=CHUNKS,
            subjects=[OWN.every, CHUNK.every],
            allow_direct=True,
            allow_msg_ttl=True,
            duplicate_window=60,
            republish=api.RePublish(src=CHUNK.every, dest="live.chunk.{{wildcard(1)}}"),
        )
    )
    yield bus
    await jetstream.delete_stream(CHUNKS)


async def put(bus: Bus, session: str, number: int) -> int:
    ack = await append(bus, CHUNK.of(session), b"%d" % number, message_id=f"{session}:{number}")
    return ack.sequence


async def test_a_repeated_append_is_answered_with_the_first_ones_place(bus: Bus) -> None:
    first = await append(bus, CHUNK.of("a"), b"0", message_id="a:0")
    again = await append(bus, CHUNK.of("a"), b"0", message_id="a:0")
    assert (first.duplicate, again.duplicate, again.sequence) == (False, True, first.sequence)


async def test_the_fence_lets_the_owner_in_and_keeps_all_others_out(bus: Bus) -> None:
    own = (await append(bus, OWN.of("a"), b"1", message_id="own:a:1", expect=(OWN.of("a"), 0))).sequence
    await append(bus, CHUNK.of("a"), b"0", message_id="a:0", expect=(OWN.of("a"), own))
    newer = await append(bus, OWN.of("a"), b"2", message_id="own:a:2", expect=(OWN.of("a"), own))
    with pytest.raises(FencedError) as caught:
        await append(bus, CHUNK.of("a"), b"1", message_id="a:1", expect=(OWN.of("a"), own))
    assert caught.value.field == OWN.of("a")
    await append(bus, CHUNK.of("a"), b"1", message_id="a:1", expect=(OWN.of("a"), newer.sequence))
    for expected in (0, own, newer.sequence + 100):
        with pytest.raises(FencedError):
            await append(
                bus, OWN.of("a"), b"3", message_id=f"own:a:3:{expected}", expect=(OWN.of("a"), expected)
            )
    with pytest.raises(FencedError):
        await append(bus, CHUNK.of("b"), b"0", message_id="b:0", expect=(OWN.of("b"), own))
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
    assert await asyncio.wait_for(whole, 30) == list(range(60))
    assert await asyncio.wait_for(rest, 30) == list(range(10, 60))


async def test_a_follower_notices_what_was_lost_on_the_way(bus: Bus) -> None:
    """Live messages travel at most once: one in three does not arrive here."""
    lossy = bus.client.subscribe

    async def subscribe(subject: str, cb=None, **options):  # type: ignore[no-untyped-def]
        async def sometimes(message) -> None:  # type: ignore[no-untyped-def]
            if int(message.data) % 3:
                await cb(message)

        return await lossy(subject, cb=sometimes, **options)

    bus.client.subscribe = subscribe  # type: ignore[method-assign, assignment]
    try:
        task = asyncio.create_task(follow_until(bus, "lossy", 31))
        for number in range(31):
            await put(bus, "lossy", number)
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(task, 30) == list(range(31))
    finally:
        bus.client.subscribe = lossy  # type: ignore[method-assign]


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


async def read_until(bus: Bus, count: int, after: int = 0, **options: object) -> list[Entry]:
    found: list[Entry] = []
    async for entries in read(bus, CHUNKS, [CHUNK.every], after, **options):  # type: ignore[arg-type]
        found += entries
        if len(found) >= count:
            break
    return found


async def test_reading_from_a_position_in_order_across_subjects(bus: Bus) -> None:
    places = [await put(bus, f"s{number % 3}", number) for number in range(50)]
    await append(bus, OWN.of("s0"), b"", message_id="own:s0:1")
    reading = asyncio.create_task(read_until(bus, 80, batch=7))
    for number in range(50, 80):
        places.append(await put(bus, f"s{number % 3}", number))
    found = await asyncio.wait_for(reading, 30)
    assert [entry.sequence for entry in found] == places
    assert [int(entry.data) for entry in found] == list(range(80))
    later = await asyncio.wait_for(read_until(bus, 30, after=places[49]), 30)
    assert [int(entry.data) for entry in later] == list(range(50, 80))


async def test_headers_alone_can_be_read(bus: Bus) -> None:
    await append(bus, CHUNK.of("a"), b"video" * 100, message_id="a:0", headers={"Ts-Chunk": "header"})
    [entry] = await asyncio.wait_for(read_until(bus, 1, headers_only=True), 30)
    assert (entry.data, entry.headers["Ts-Chunk"]) == (b"", "header")


async def test_a_reader_whose_consumer_is_taken_away_goes_on(bus: Bus) -> None:
    await put(bus, "a", 0)
    found: list[int] = []

    async def reader() -> None:
        async for entries in read(bus, CHUNKS, [CHUNK.every], 0):
            found.extend(int(entry.data) for entry in entries)
            if len(found) == 3:
                return

    reading = asyncio.create_task(reader())
    while not found:
        await asyncio.sleep(0.05)
    jetstream = bus.jetstream()
    for info in await jetstream.consumers_info(CHUNKS):
        await jetstream.delete_consumer(CHUNKS, info.name)
    await put(bus, "a", 1)
    await put(bus, "a", 2)
    await asyncio.wait_for(reading, 40)
    assert found == [0, 1, 2]


async def test_a_stream_made_anew_is_read_from_its_beginning(bus: Bus) -> None:
    await put(bus, "a", 0)
    assert [int(entry.data) for entry in await asyncio.wait_for(read_until(bus, 1, after=500), 30)] == [0]


async def test_a_consumer_keeps_the_order_through_failures_and_drops_only_what_nobody_can_read(
    bus: Bus,
) -> None:
    for number in range(10):
        body = b"garbage" if number == 4 else SessionRef(session=f"s{number}").to_bytes()
        await append(bus, CHUNK.of("a"), body, message_id=f"a:{number}")
    handled: list[str] = []
    failed: set[str] = set()
    done = asyncio.Event()

    async def handle(entry: Entry) -> None:
        session = SessionRef.from_bytes(entry.data).session
        if session in ("s2", "s7") and session not in failed:
            failed.add(session)
            raise RuntimeError("for the moment")
        handled.append(session)
        if session == "s9":
            done.set()

    task = asyncio.create_task(consume(bus, CHUNKS, "test", [CHUNK.every], handle))
    try:
        await asyncio.wait_for(done.wait(), 60)
    finally:
        await stop(task)
    assert handled == [f"s{number}" for number in range(10) if number != 4]


async def test_a_consumer_that_died_over_a_message_gets_it_again_before_all_others(bus: Bus) -> None:
    for number in range(6):
        await put(bus, "a", number)
    handled: list[int] = []
    stuck, done = asyncio.Event(), asyncio.Event()

    async def die(entry: Entry) -> None:
        if int(entry.data) == 2:
            stuck.set()
            await asyncio.sleep(3_600)
        handled.append(int(entry.data))

    async def live(entry: Entry) -> None:
        handled.append(int(entry.data))
        if int(entry.data) == 5:
            done.set()

    first = asyncio.create_task(consume(bus, CHUNKS, "mortal", [CHUNK.every], die))
    await asyncio.wait_for(stuck.wait(), 30)
    await stop(first)
    second = asyncio.create_task(consume(bus, CHUNKS, "mortal", [CHUNK.every], live))
    try:
        await asyncio.wait_for(done.wait(), 60)
    finally:
        await stop(second)
    assert handled == list(range(6))


async def test_a_handler_may_take_longer_than_the_broker_waits(bus: Bus, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(consumer, "ACK_WAIT_S", 3.0)
    for number in range(2):
        await put(bus, "a", number)
    begun: list[int] = []
    done = asyncio.Event()

    async def slow(entry: Entry) -> None:
        begun.append(int(entry.data))
        if int(entry.data) == 0:
            await asyncio.sleep(7.5)
        else:
            done.set()

    # Two instances: what the broker takes for unanswered, it gives to the idle one.
    tasks = [asyncio.create_task(consume(bus, CHUNKS, "slow", [CHUNK.every], slow)) for _ in range(2)]
    try:
        await asyncio.wait_for(done.wait(), 60)
    finally:
        await stop(*tasks)
    assert begun == [0, 1]

"""Reading the headers of a log in order, as the state store counts chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from nats.js import api

from tests.helpers.waiting import eventually
from tests.shared.conftest import Connect
from turboserve.bus import Bus, Entry, append, read_headers, reader
from turboserve.subjects import CHUNK, CHUNKS, OWN

pytestmark = pytest.mark.usefixtures("patient_reads")
LIMIT_S = 120.0


@pytest.fixture
async def admin(connect: Connect) -> AsyncIterator[Bus]:
    bus: Bus = await connect("admin")
    await bus.jetstream().add_stream(
        api.StreamConfig(
            name=CHUNKS, subjects=[OWN.every, CHUNK.every], storage=api.StorageType.MEMORY, allow_direct=True
        )
    )
    yield bus
    await bus.jetstream().delete_stream(CHUNKS)


@pytest.fixture
async def store(admin: Bus, connect: Connect) -> Bus:
    """A bus with the permissions of the only service that may create a consumer."""
    bus: Bus = await connect("state-store")
    return bus


async def put(bus: Bus, session: str, number: int) -> int:
    headers = {"Ts-Chunk": str(number)}
    ack = await append(
        bus, CHUNK.by(session, "w1"), b"video" * 100, message_id=f"{session}:{number}", headers=headers
    )
    return ack.sequence


async def read_until(bus: Bus, count: int, after: int = 0, batch: int = 256) -> list[Entry]:
    found: list[Entry] = []
    async for entries in read_headers(bus, CHUNKS, [CHUNK.every], after, batch=batch):
        found += entries
        if len(found) >= count:
            break
    return found


def numbers(entries: list[Entry]) -> list[int]:
    assert all(entry.data == b"" for entry in entries)
    return [int(entry.headers["Ts-Chunk"]) for entry in entries]


async def test_headers_are_read_from_a_position_in_order_across_subjects(admin: Bus, store: Bus) -> None:
    places = [await put(admin, f"s{number % 3}", number) for number in range(50)]
    await append(admin, OWN.of("s0"), b"", message_id="own:s0:1")
    reading = asyncio.create_task(read_until(store, 80, batch=7))
    for number in range(50, 80):
        places.append(await put(admin, f"s{number % 3}", number))
    found = await asyncio.wait_for(reading, LIMIT_S)
    assert [entry.sequence for entry in found] == places
    assert numbers(found) == list(range(80))
    later = await asyncio.wait_for(read_until(store, 30, after=places[49]), LIMIT_S)
    assert numbers(later) == list(range(50, 80))


async def test_a_reader_whose_consumer_is_deleted_goes_on(admin: Bus, store: Bus) -> None:
    await put(admin, "a", 0)
    found: list[int] = []

    async def reader() -> None:
        async for entries in read_headers(store, CHUNKS, [CHUNK.every], 0):
            found.extend(numbers(entries))
            if len(found) == 3:
                return

    reading = asyncio.create_task(reader())
    await eventually(lambda: found)
    jetstream = admin.jetstream()
    for info in await jetstream.consumers_info(CHUNKS):
        await jetstream.delete_consumer(CHUNKS, info.name)
    await put(admin, "a", 1)
    await put(admin, "a", 2)
    await asyncio.wait_for(reading, LIMIT_S)
    assert found == [0, 1, 2]


async def test_a_stream_made_anew_is_read_from_its_beginning(admin: Bus, store: Bus) -> None:
    await put(admin, "a", 0)
    assert numbers(await asyncio.wait_for(read_until(store, 1, after=500), LIMIT_S)) == [0]


@pytest.mark.parametrize("lost", [{0}, {4}, {3, 4}, {0, 2, 4}])
async def test_messages_that_are_lost_on_the_way_are_read_again(
    admin: Bus, store: Bus, monkeypatch: pytest.MonkeyPatch, lost: set[int]
) -> None:
    """Also the last ones, which no later message reveals. Messages before a gap are not read twice."""
    monkeypatch.setattr(reader, "FETCH_S", 0.3)
    monkeypatch.setattr(reader, "ANSWER_S", 0.3)
    whole = store.client.subscribe

    async def subscribe(subject: str, cb: Any, **options: Any) -> Any:
        async def sometimes(message: Any) -> None:
            number = int((message.headers or {}).get("Ts-Chunk", -1))
            if number in lost:
                lost.remove(number)
            else:
                await cb(message)

        return await whole(subject, cb=sometimes, **options)

    monkeypatch.setattr(store.client, "subscribe", subscribe)
    for number in range(5):
        await put(admin, "a", number)
    assert numbers(await asyncio.wait_for(read_until(store, 5), LIMIT_S)) == list(range(5))


async def test_headers_of_a_stored_message_do_not_pass_for_the_brokers(admin: Bus, store: Bus) -> None:
    """With `Status` the broker ends a request: for such a message a reader would retry for ever."""
    await put(admin, "a", 0)
    for status in ("404", "408", "503", "100"):
        headers = {"Status": status, "Description": "x", "Nats-Sequence": "1"}
        await append(admin, CHUNK.by("a", "w2"), b"", message_id=f"x{status}", headers=headers)
    await put(admin, "a", 1)
    found = await asyncio.wait_for(read_until(store, 6), LIMIT_S)
    assert [entry.sequence for entry in found] == list(range(1, 7))

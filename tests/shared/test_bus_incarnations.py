"""A stream that was deleted and created again under its followers: a broker that lost its disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from nats.js import api

from tests.helpers.followers import acquainted
from tests.helpers.waiting import eventually
from tests.shared.conftest import Connect
from turboserve.bus import Bus, append, feeds, follow, follower, last_entry, read, read_headers, reader
from turboserve.subjects import CHUNK, CHUNKS, OWN
from turboserve.tasks import stop

LIMIT_S = 60


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower looks for a new stream after this much silence."""
    monkeypatch.setattr(follower, "QUIET_S", 0.2)
    monkeypatch.setattr(follower, "QUIET_LIMIT_S", 0.8)
    monkeypatch.setattr(feeds, "ASK_S", 0.2)


async def make(bus: Bus) -> None:
    await bus.jetstream().add_stream(
        api.StreamConfig(
            name=CHUNKS,
            subjects=[OWN.every, CHUNK.every],
            storage=api.StorageType.MEMORY,
            allow_direct=True,
            republish=api.RePublish(src=">", dest="live.>"),
        )
    )


@pytest.fixture
async def bus(connect: Connect) -> AsyncIterator[Bus]:
    bus = await connect("admin")
    await make(bus)
    yield bus
    await bus.jetstream().delete_stream(CHUNKS)


@pytest.fixture
async def gateway(connect: Connect) -> Bus:
    """A bus with the permissions of a service that follows."""
    bus: Bus = await connect("gateway")
    return bus


async def put(bus: Bus, *texts: str) -> None:
    for text in texts:
        await append(bus, CHUNK.by("a", "w1"), text.encode(), message_id=text)


class Following:
    """The messages that one follower of session `a` has received."""

    def __init__(self, bus: Bus, after: int = 0) -> None:
        self.found: list[str] = []
        self._task = asyncio.create_task(self._follow(bus, after))

    async def _follow(self, bus: Bus, after: int) -> None:
        subject = CHUNK.of("a")
        async for entry in follow(bus, CHUNKS, subject, CHUNK.live("a"), after_sequence=after):
            self.found.append(entry.data.decode())

    async def until(self, *texts: str) -> None:
        """Wait until it received these, in order.

        One from before the loss was noticed may have come twice.
        """
        async with asyncio.timeout(LIMIT_S):
            while list(dict.fromkeys(reversed(self.found)))[::-1] != list(texts):
                assert not self._task.done(), self._task.exception()
                await asyncio.sleep(0.02)
        self._task.cancel()


async def anew(bus: Bus) -> None:
    await bus.jetstream().delete_stream(CHUNKS)
    await make(bus)


async def test_a_new_stream_is_followed_from_its_beginning(bus: Bus, gateway: Bus) -> None:
    """Incident: its first messages were never delivered, since the follower had passed their sequences."""
    following = Following(gateway)
    await put(bus, *"123456")
    await eventually(lambda: len(following.found) >= 6)
    await acquainted(gateway, CHUNKS)
    await anew(bus)
    await put(bus, "7")
    await put(bus, "8")
    await following.until(*"12345678")


async def test_a_new_stream_that_has_outgrown_the_old_one_unnoticed_is_read_whole(
    bus: Bus, gateway: Bus
) -> None:
    following = Following(gateway)
    await put(bus, "1")
    await eventually(lambda: following.found)
    await acquainted(gateway, CHUNKS)
    await anew(bus)
    await put(bus, *"2345")
    await following.until(*"12345")


async def test_a_place_beyond_the_streams_end_belongs_to_another_stream(bus: Bus, gateway: Bus) -> None:
    """A viewer returns with a position from before the loss, to a gateway that never saw the old stream."""
    await put(bus, *"12")
    await Following(gateway, after=500).until(*"12")


async def test_a_follower_at_the_end_of_a_stream_that_stays_gets_nothing_twice(
    bus: Bus, gateway: Bus
) -> None:
    await put(bus, *"123")
    newest = await last_entry(gateway, CHUNKS, CHUNK.of("a"))
    assert newest is not None
    behind = Following(gateway, after=newest.sequence)
    whole = Following(gateway)
    for text in "4567":
        # Longer than the silence after which a follower looks.
        await asyncio.sleep(2 * follower.QUIET_S)
        await put(bus, text)
    await behind.until(*"4567")
    await whole.until(*"1234567")
    assert (len(behind.found), len(whole.found)) == (4, 7)


async def test_a_reader_of_many_subjects_goes_on_with_a_new_stream_that_is_longer_than_its_place(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the admin: no service reads CHUNKS by pages, so none may."""
    found: list[str] = []

    async def read_on() -> None:
        async for entries in read(bus, [CHUNK], 0):
            found.extend(entry.data.decode() for entry in entries)

    monkeypatch.setattr(reader, "QUIET_S", 0.2)
    reading = asyncio.create_task(read_on())
    await put(bus, "1")
    await eventually(lambda: found)
    await acquainted(bus, CHUNKS)
    await anew(bus)
    await put(bus, *"2345")
    await eventually(lambda: list(dict.fromkeys(reversed(found)))[::-1] == list("12345"), LIMIT_S)
    await stop(reading)


async def test_a_reader_of_headers_goes_on_with_a_new_stream_that_is_longer_than_its_place(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "FETCH_S", 0.5)
    found: list[str] = []

    async def read_on() -> None:
        async for entries in read_headers(bus, CHUNKS, [CHUNK.every], 0):
            found.extend(entry.headers["Nats-Msg-Id"] for entry in entries)

    reading = asyncio.create_task(read_on())
    await put(bus, "1")
    await eventually(lambda: found)
    await anew(bus)
    await put(bus, *"2345")
    await eventually(lambda: found == list("12345"), LIMIT_S)
    await stop(reading)

"""Reading several logs of one stream, as the scheduler reads events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.js import api

from tests.shared.conftest import Connect
from turboserve.bus import Bus, Entry, append, pages, read, reader
from turboserve.bus.pages import Page, read_page
from turboserve.contracts.errors import UnavailableError
from turboserve.subjects import EVENT, EVENTS, WORKER_EVENT

pytestmark = pytest.mark.usefixtures("patient_reads")
LIMIT_S = 60
SOURCES = (EVENT, WORKER_EVENT)
OTHER = "canary.EVENTS"
"""A subject of the stream that the reader does not read."""
Hear = Callable[[Any], Awaitable[None]]


@pytest.fixture
async def admin(connect: Connect) -> AsyncIterator[Bus]:
    bus: Bus = await connect("admin")
    await bus.jetstream().add_stream(
        api.StreamConfig(
            name=EVENTS,
            subjects=[EVENT.every, WORKER_EVENT.every, OTHER],
            storage=api.StorageType.MEMORY,
            allow_direct=True,
            republish=api.RePublish(src=">", dest="live.>"),
        )
    )
    yield bus
    await bus.jetstream().delete_stream(EVENTS)


@pytest.fixture
async def scheduler(admin: Bus, connect: Connect) -> Bus:
    """A bus with the permissions of the service that reads this way."""
    bus: Bus = await connect("scheduler")
    return bus


async def put(bus: Bus, numbers: Sequence[int]) -> list[int]:
    """Append events of three sessions and a worker. Returns their sequences."""
    names = (EVENT.of("s0"), WORKER_EVENT.of("w"), EVENT.of("s1"), EVENT.of("s2"))
    return [
        (await append(bus, names[number % 4], b"%d" % number, message_id=str(number))).sequence
        for number in numbers
    ]


async def put_other(bus: Bus) -> None:
    await append(bus, OTHER, b"{}", message_id="")


async def read_until(bus: Bus, count: int, after: int = 0, batch: int = 512) -> list[Entry]:
    found: list[Entry] = []
    async with aclosing(read(bus, SOURCES, after, batch=batch)) as batches:
        async for entries in batches:
            assert 0 < len(entries) <= batch
            found += entries
            if len(found) >= count:
                break
    return found


def numbers(entries: Sequence[Entry]) -> list[int]:
    return [int(entry.data) for entry in entries]


def lossy(bus: Bus, monkeypatch: pytest.MonkeyPatch, lost: Callable[[Any], bool]) -> None:
    """Drop messages for which `lost` is true, at subscriptions made from now on."""
    whole = bus.client.subscribe

    async def subscribe(subject: str, cb: Hear, **options: Any) -> Any:
        async def sometimes(message: Any) -> None:
            if not lost(message):
                await cb(message)

        return await whole(subject, cb=sometimes, **options)

    monkeypatch.setattr(bus.client, "subscribe", subscribe)


async def test_past_and_present_of_all_logs_in_the_streams_order(admin: Bus, scheduler: Bus) -> None:
    places = await put(admin, range(50))
    reading = asyncio.create_task(read_until(scheduler, 120, batch=7))
    rest = asyncio.create_task(read_until(scheduler, 90, after=places[29]))
    for number in range(50, 120):
        places += await put(admin, [number])
        if number % 5 == 0:
            await put_other(admin)
    found = await asyncio.wait_for(reading, LIMIT_S)
    assert [entry.sequence for entry in found] == places
    assert numbers(found) == list(range(120))
    assert numbers(await asyncio.wait_for(rest, LIMIT_S)) == list(range(30, 120))


async def test_lost_live_messages_are_read_from_the_log(
    admin: Bus, scheduler: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live messages are delivered at most once: one in three does not arrive here."""
    lossy(scheduler, monkeypatch, lambda raw: raw.subject.startswith("live.") and int(raw.data) % 3 == 0)
    reading = asyncio.create_task(read_until(scheduler, 31))
    for number in range(31):
        await put(admin, [number])
        await asyncio.sleep(0.01)
    assert numbers(await asyncio.wait_for(reading, LIMIT_S)) == list(range(31))


async def test_messages_of_others_and_deleted_ones_hold_nothing_up(
    admin: Bus, scheduler: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that never come are no reason to wait. Otherwise the reader would wait for an hour here."""
    monkeypatch.setattr(reader, "QUIET_S", 3_600.0)
    [first, second, *_] = await put(admin, range(4))
    await admin.jetstream().delete_msg(EVENTS, second)
    reading = asyncio.create_task(read_until(scheduler, 40))
    for number in range(4, 41):
        await put_other(admin)
        await put(admin, [number])
    assert numbers(await asyncio.wait_for(reading, LIMIT_S)) == [0, *range(2, 41)]
    assert numbers(await asyncio.wait_for(read_until(scheduler, 39, after=first), LIMIT_S))[0] == 2


async def test_a_slow_reader_loses_nothing_and_holds_little(
    admin: Bus, scheduler: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "BACKLOG", 4)
    await put(admin, [0])
    found: list[int] = []
    async with aclosing(read(scheduler, SOURCES, 0)) as batches:
        async for entries in batches:
            if not found:
                await put(admin, range(1, 40))
                await scheduler.flush()
            found += numbers(entries)
            if len(found) >= 40:
                break
    assert found == list(range(40))


async def test_a_message_that_is_lost_within_a_page_makes_the_page_void(
    admin: Bus, scheduler: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(admin, range(10))
    lost = {3}

    def once(raw: Any) -> bool:
        number = int(raw.data) if raw.data else -1
        return number in lost and not lost.remove(number)  # type: ignore[func-returns-value]

    lossy(scheduler, monkeypatch, once)
    with pytest.raises(UnavailableError, match="lost in transit"):
        await read_page(scheduler, EVENTS, 1, 100)
    assert numbers((await read_page(scheduler, EVENTS, 1, 100)).entries) == list(range(10))
    lost.add(9)
    assert numbers(await asyncio.wait_for(read_until(scheduler, 10), LIMIT_S)) == list(range(10))


async def test_pages_end_where_they_are_asked_to(
    admin: Bus, scheduler: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await read_page(scheduler, EVENTS, 1, 10) == Page((), True)
    places = await put(admin, range(10))
    page = await read_page(scheduler, EVENTS, places[2], 5)
    assert ([entry.sequence for entry in page.entries], page.complete) == (places[2:7], False)
    page = await read_page(scheduler, EVENTS, places[5], 5)
    assert ([entry.sequence for entry in page.entries], page.complete) == (places[5:], True)
    monkeypatch.setattr(pages, "PAGE_BYTES", 1)
    page = await read_page(scheduler, EVENTS, places[0], 5)
    assert ([entry.sequence for entry in page.entries], page.complete) == (places[:1], False)
    assert numbers(await asyncio.wait_for(read_until(scheduler, 10), LIMIT_S)) == list(range(10))


async def test_a_stream_that_cannot_be_asked_is_unavailable(
    scheduler: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PAGE_TIMEOUT_S", 0.2)
    with pytest.raises(UnavailableError):
        await read_page(scheduler, "CHUNKS", 1, 10)


class FakeStream:
    """A stream in memory, whose republished messages may be lost."""

    def __init__(self) -> None:
        self.stored: dict[int, Entry] = {}
        self.last = 0
        self._hear: dict[str, Hear] = {}
        self.client = SimpleNamespace(subscribe=self._subscribe)
        self.incarnations = SimpleNamespace(look=lambda _stream: None)

    async def _subscribe(self, subject: str, cb: Hear) -> Any:
        self._hear[subject] = cb

        async def unsubscribe() -> None:
            self._hear.pop(subject, None)

        return SimpleNamespace(unsubscribe=unsubscribe)

    async def append(self, subject: str, arrives: bool) -> None:
        self.last += 1
        headers = {"Nats-Sequence": str(self.last), "Nats-Subject": subject}
        self.stored[self.last] = Entry(subject, self.last, b"", headers)
        hear = self._hear.get(f"live.{subject.rpartition('.')[0]}.*")
        if arrives and hear is not None:
            await hear(SimpleNamespace(headers=headers, data=b""))

    async def read_page(self, _bus: Any, _stream: str, sequence: int, limit: int) -> Page:
        found = [entry for place, entry in sorted(self.stored.items()) if place >= sequence]
        # More happens while the answer is on its way.
        await asyncio.sleep(0)
        return Page(tuple(found[:limit]), len(found) <= limit)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["event.a", "event.b", "worker-event.w", OTHER]), st.booleans()),
        st.tuples(st.just("delete"), st.integers(0, 5)),
        st.tuples(st.just("run"), st.integers(1, 6)),
    ),
    max_size=40,
)


@given(steps=STEPS, batch=st.integers(1, 4), backlog=st.integers(1, 4))
def test_each_message_is_read_once_in_order_whatever_is_lost_or_deleted(
    steps: list[tuple[str, int]], batch: int, backlog: int
) -> None:
    """A message that is never deleted is read. A deleted one may be read before, and delays nothing."""
    with pytest.MonkeyPatch.context() as patch:
        fake = FakeStream()
        patch.setattr(reader, "read_page", fake.read_page)
        patch.setattr(reader, "BACKLOG", backlog)
        patch.setattr(reader, "QUIET_S", 0.001)
        asyncio.run(_play(fake, steps, batch))


async def _play(fake: FakeStream, steps: list[tuple[str, int]], batch: int) -> None:
    found: list[Entry] = []

    async def run() -> None:
        async for entries in read(fake, SOURCES, 0, batch=batch):  # type: ignore[arg-type]
            found.extend(entries)

    deleted: set[int] = set()
    appended: dict[int, str] = {}
    async with asyncio.timeout(LIMIT_S):
        reading = asyncio.create_task(run())
        for step, value in steps:
            if step == "delete":
                gone = max(1, fake.last - value)
                deleted.add(gone)
                fake.stored.pop(gone, None)
            elif step == "run":
                for _ in range(value):
                    await asyncio.sleep(0)
            else:
                await fake.append(step, bool(value))
                appended[fake.last] = step
        wanted = {place for place, subject in appended.items() if subject != OTHER}
        while not wanted - deleted <= {entry.sequence for entry in found}:
            assert not reading.done(), reading.exception()
            await asyncio.sleep(0.001)
        reading.cancel()
    places = [entry.sequence for entry in found]
    assert places == sorted(set(places))
    assert set(places) <= wanted

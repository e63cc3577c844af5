"""Reading generators while waiting for another event: no item is lost, every generator is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from turboserve.tasks import or_silence, until


class Source:
    def __init__(self, pauses_s: list[float]) -> None:
        self.pauses_s = pauses_s
        self.begun = asyncio.Event()
        self.closed = False

    async def items(self) -> AsyncGenerator[int, None]:
        self.begun.set()
        try:
            for number, pause_s in enumerate(self.pauses_s):
                await asyncio.sleep(pause_s)
                yield number
        finally:
            self.closed = True


async def test_until_gives_everything_when_nothing_stops_it() -> None:
    source = Source([0, 0.01, 0])
    assert [item async for item in until(source.items(), asyncio.Event())] == [0, 1, 2]
    assert source.closed


async def test_until_cancels_its_wait_on_the_event() -> None:
    source, stop = Source([0, 3600]), asyncio.Event()
    found = []
    async for item in until(source.items(), stop):
        found.append(item)
        # The call happens while the second item is awaited.
        asyncio.get_running_loop().call_later(0.05, stop.set)
    assert found == [0]
    assert source.closed


async def test_until_closes_its_source_when_cancelled() -> None:
    source = Source([3600])

    async def read() -> None:
        async for _ in until(source.items(), asyncio.Event()):
            pass

    task = asyncio.create_task(read())
    await source.begun.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert source.closed


async def test_silence_is_none_and_loses_no_item() -> None:
    silence, closed = asyncio.Event(), False

    async def source() -> AsyncGenerator[int, None]:
        nonlocal closed
        try:
            yield 0
            await silence.wait()
            yield 1
            yield 2
        finally:
            closed = True

    items = []
    async for item in or_silence(source(), 0.1):
        items.append(item)
        if item is None and 0 in items:
            silence.set()
    assert [item for item in items if item is not None] == [0, 1, 2]
    assert None in items[items.index(0) : items.index(1)]
    assert closed

"""Two ways to read an async generator without losing an item when something else happens first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def until(source: AsyncGenerator[T, None], stop: asyncio.Event) -> AsyncGenerator[T, None]:
    """Items of `source` until `stop` is set; an item that is being waited for then is given up."""
    over = asyncio.ensure_future(stop.wait())
    try:
        async with aclosing(source):
            while not stop.is_set():
                coming = asyncio.ensure_future(anext(source))
                try:
                    await asyncio.wait({coming, over}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await _give_up(coming)
                if coming.cancelled():
                    return
                try:
                    item = coming.result()
                except StopAsyncIteration:
                    return
                yield item
    finally:
        over.cancel()


async def or_silence(source: AsyncGenerator[T, None], seconds: float) -> AsyncGenerator[T | None, None]:
    """Items of `source`, and None whenever there was none for `seconds`."""
    async with aclosing(source):
        while True:
            coming = asyncio.ensure_future(anext(source))
            try:
                while not (await asyncio.wait({coming}, timeout=seconds))[0]:
                    yield None
            finally:
                await _give_up(coming)
            try:
                item = coming.result()
            except StopAsyncIteration:
                return
            yield item


async def _give_up(task: asyncio.Future[T]) -> None:
    # Waited for: a generator cannot be closed while it still runs.
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

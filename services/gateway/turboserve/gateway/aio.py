"""Reading an async generator without losing an item when something else happens first; ending tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_AGAIN_S = 2.0


async def until(source: AsyncGenerator[T, None], over: asyncio.Event) -> AsyncGenerator[T, None]:
    """Items of `source` until `over` is set; an item that is being waited for then is given up."""
    ending = asyncio.ensure_future(over.wait())
    try:
        async with aclosing(source):
            while not over.is_set():
                coming = asyncio.ensure_future(anext(source))
                try:
                    await asyncio.wait({coming, ending}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    # A generator cannot be closed while it still runs.
                    if not coming.done():
                        await stop(coming)
                if coming.cancelled():
                    return
                try:
                    item = coming.result()
                except StopAsyncIteration:
                    return
                yield item
    finally:
        ending.cancel()


async def or_silence(source: AsyncGenerator[T, None], seconds: float) -> AsyncGenerator[T | None, None]:
    """Items of `source`, and None whenever there was none for `seconds`."""
    async with aclosing(source):
        while True:
            coming = asyncio.ensure_future(anext(source))
            try:
                while not (await asyncio.wait({coming}, timeout=seconds))[0]:
                    yield None
            finally:
                if not coming.done():
                    await stop(coming)
            try:
                item = coming.result()
            except StopAsyncIteration:
                return
            yield item


async def stop(*tasks: asyncio.Future[Any]) -> None:
    """Cancel `tasks` and wait until they are over; what they raise is dropped.

    Asked for again and again: a library's `wait_for` can swallow one cancellation before Python 3.12.
    """
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()

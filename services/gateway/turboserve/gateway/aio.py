"""Reading an async generator without losing an item when something else happens first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from turboserve.tasks import stop

T = TypeVar("T")


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

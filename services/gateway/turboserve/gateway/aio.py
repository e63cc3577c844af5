"""Helpers that read an async generator until an event occurs, report its silence, or repeat a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from turboserve.contracts.errors import UnavailableError
from turboserve.tasks import stop

RETRY_S = 0.2
T = TypeVar("T")


async def until(source: AsyncGenerator[T, None], over: asyncio.Event) -> AsyncGenerator[T, None]:
    """Yield items of `source` until `over` is set, which cancels a pending wait for the next item."""
    scope: asyncio.Timeout | None = None

    async def end() -> None:
        await over.wait()
        if scope is not None:
            scope.reschedule(asyncio.get_running_loop().time())

    ending = asyncio.ensure_future(end())
    try:
        async with aclosing(source):
            while not over.is_set():
                try:
                    # One task serves all items: a task for each item would cost more than the item.
                    async with asyncio.timeout(None) as scope:
                        item = await anext(source)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    if scope is None or not scope.expired():
                        raise
                    return
                finally:
                    scope = None
                yield item
    finally:
        ending.cancel()


async def or_silence(source: AsyncGenerator[T, None], seconds: float) -> AsyncGenerator[T | None, None]:
    """Yield items of `source`, and None after every `seconds` without an item."""
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


async def answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Call `ask` until it does not raise UnavailableError."""
    while True:
        try:
            return await ask()
        except UnavailableError:
            await asyncio.sleep(RETRY_S)

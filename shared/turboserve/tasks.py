"""Background tasks, reliable cancellation of asyncio tasks, and waits for async generators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

from turboserve.contracts.errors import UnavailableError

CANCEL_AGAIN_S = 2.0
RETRY_S = 0.2

T = TypeVar("T")


class BackgroundTasks:
    """Tasks that end by themselves or with `stop`. It keeps them from the garbage collector.

    `asyncio.TaskGroup` does not fit: its tasks must start inside one `async with`, and the first failure
    cancels all others. These tasks start from callbacks, and each handles its own failure.
    """

    def __init__(self, ended: Callable[[asyncio.Task[Any]], None] | None = None) -> None:
        """`ended` is called with each task that has ended."""
        self._running: dict[asyncio.Task[Any], None] = {}
        """In the order of their start, so that a simulation repeats exactly."""
        self._ended = ended

    def create(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Start `work` as a task."""
        return self.add(asyncio.create_task(work, name=name))

    def add(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        """Keep a task until it ends."""
        if task not in self._running:
            self._running[task] = None
            task.add_done_callback(self._running.pop if self._ended is None else self._end)
        return task

    def _end(self, task: asyncio.Task[Any]) -> None:
        del self._running[task]
        assert self._ended is not None
        self._ended(task)

    async def wait(self, timeout_s: float) -> None:
        """Wait until all tasks have ended, at most `timeout_s` seconds."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(tuple(self._running))

    def cancel(self) -> None:
        """Request the end of all tasks."""
        for task in self._running:
            task.cancel()

    async def stop(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        await stop(*self._running)


async def stop(*tasks: asyncio.Future[Any]) -> None:
    """Cancel `tasks` and wait until all have ended. Exceptions that they raise are dropped.

    The cancellation is repeated every CANCEL_AGAIN_S seconds: libraries use `wait_for`, which can swallow a
    cancellation before Python 3.12.
    """
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()


async def until(source: AsyncGenerator[T, None], over: asyncio.Event) -> AsyncGenerator[T, None]:
    """Yield items of `source` until `over` is set, which cancels a pending wait for the next item."""
    waiting: asyncio.Task[Any] | None = None
    """The task that waits for the next item."""
    canceled = False

    async def end() -> None:
        nonlocal canceled
        await over.wait()
        if waiting is not None:
            canceled = waiting.cancel()

    ending = asyncio.ensure_future(end())
    try:
        async with aclosing(source):
            while not over.is_set():
                # One task ends all waits: a task, or a timeout, for each item would cost more than the item.
                waiting = task = asyncio.current_task()
                assert task is not None
                others = task.cancelling()
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    return
                except asyncio.CancelledError:
                    if canceled and task.uncancel() <= others:
                        return
                    raise
                finally:
                    waiting = None
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

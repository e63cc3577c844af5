"""Waiting for what other tasks, threads and processes bring about. New tests poll with these functions."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest

LIMIT_S = 120.0
"""Longer than any condition takes on a busy machine."""
INTERVAL_S = 0.02
LONGEST_INTERVAL_S = 0.1
GROWTH = 1.25
"""Factor between one interval and the next, up to the longest: a look may be a request to a service."""


async def eventually(
    condition: Callable[[], object], limit_s: float = LIMIT_S, what: Callable[[], object] | str = ""
) -> None:
    """Poll `condition`, which may be a coroutine function, until its result is true.

    Raises `AssertionError` after `limit_s` seconds of the running loop's time, with `what` (or what `what`
    returns then) and the last result. A call of `condition` that has not returned by then is cancelled.
    """
    clock = asyncio.get_running_loop().time
    end, interval_s = clock() + limit_s, INTERVAL_S
    while True:
        result = condition()
        awaited = inspect.isawaitable(result)
        if inspect.isawaitable(result):
            try:
                async with asyncio.timeout_at(end) as limit:
                    result = await result
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise AssertionError(_failure(condition, "it did not return", limit_s, what)) from error
        if result:
            return
        if clock() >= end:
            raise AssertionError(_failure(condition, result, limit_s, what))
        await asyncio.sleep(interval_s)
        if awaited:
            interval_s = min(LONGEST_INTERVAL_S, GROWTH * interval_s)


def eventually_blocking(
    condition: Callable[[], object], limit_s: float = LIMIT_S, what: Callable[[], object] | str = ""
) -> None:
    """As `eventually`, for tests without an event loop."""
    end, interval_s = time.monotonic() + limit_s, INTERVAL_S
    while not (result := condition()):
        if time.monotonic() >= end:
            raise AssertionError(_failure(condition, result, limit_s, what))
        time.sleep(interval_s)
        interval_s = min(LONGEST_INTERVAL_S, GROWTH * interval_s)


class CompletedCalls:
    """Counts the calls of an asynchronous method that end without an error, for all objects of the class."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.count = 0
        original = getattr(owner, name)

        async def counted(*args: Any, **options: Any) -> Any:
            result = await original(*args, **options)
            self.count += 1
            return result

        monkeypatch.setattr(owner, name, counted)

    async def more(self, count: int, limit_s: float = LIMIT_S) -> None:
        """Wait until `count` calls have ended that begin from now on."""
        # One may be under way.
        end = self.count + 1 + count
        await eventually(lambda: self.count >= end, limit_s)


def _failure(
    condition: Callable[[], object], result: object, limit_s: float, what: Callable[[], object] | str
) -> str:
    """Return the text of the error."""
    wanted = what() if callable(what) else what
    name = getattr(condition, "__qualname__", repr(condition))
    return f"not within {limit_s:g} s: {wanted or name}; last result: {result!r}"

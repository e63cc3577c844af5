"""Waiting for what other tasks, threads and processes bring about. Every test that polls does it here."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

LIMIT_S = 120.0
"""Longer than any condition takes on a busy machine."""
INTERVAL_S = 0.02


async def eventually(
    condition: Callable[[], object], limit_s: float = LIMIT_S, what: Callable[[], object] | str = ""
) -> None:
    """Poll `condition`, which may be a coroutine function, until its result is true.

    Raises `AssertionError` after `limit_s` seconds of the running loop's time, with `what` (or what `what`
    returns then) and the last result.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + limit_s
    while True:
        result = condition()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return
        if clock() >= end:
            raise AssertionError(_failure(condition, result, limit_s, what))
        await asyncio.sleep(INTERVAL_S)


def eventually_blocking(
    condition: Callable[[], object], limit_s: float = LIMIT_S, what: Callable[[], object] | str = ""
) -> None:
    """As `eventually`, for tests without an event loop."""
    end = time.monotonic() + limit_s
    while not (result := condition()):
        if time.monotonic() >= end:
            raise AssertionError(_failure(condition, result, limit_s, what))
        time.sleep(INTERVAL_S)


def _failure(
    condition: Callable[[], object], result: object, limit_s: float, what: Callable[[], object] | str
) -> str:
    """Return the text of the error."""
    wanted = what() if callable(what) else what
    name = getattr(condition, "__qualname__", repr(condition))
    return f"not within {limit_s:g} s: {wanted or name}; last result: {result!r}"

"""Repeats tests of counts by day that a change of the day disturbs."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import ParamSpec

P = ParamSpec("P")


def on_one_day(test: Callable[P, Awaitable[None]]) -> Callable[P, Awaitable[None]]:
    """Repeat the test if it fails while a day of UTC ends."""

    @functools.wraps(test)
    async def repeated(*args: P.args, **fields: P.kwargs) -> None:
        began = datetime.now(UTC).date()
        try:
            await test(*args, **fields)
        except Exception:
            if datetime.now(UTC).date() == began:
                raise
            await test(*args, **fields)

    return repeated

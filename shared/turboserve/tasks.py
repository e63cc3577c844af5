"""Reliable cancellation of asyncio tasks."""

from __future__ import annotations

import asyncio
from typing import Any

CANCEL_AGAIN_S = 2.0


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

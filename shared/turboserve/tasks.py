"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

CANCEL_AGAIN_S = 2.0


async def stop(*tasks: asyncio.Future[Any]) -> None:
    """Cancel `tasks` and wait until they are over; what they raise is dropped.

    Asked for again and again: before Python 3.12 `wait_for`, which libraries use, can swallow a cancellation.
    """
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()

"""What starts a worker that owns no session, without a broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from turboserve.tasks import stop


class Started:
    """What `start_decode_worker` and `start_text_worker` need of a `Runtime`."""

    def __init__(self) -> None:
        self.clock = SimpleNamespace(monotonic=time.monotonic)
        self.tasks: list[asyncio.Task[None]] = []
        self.closers: list[Callable[[], Awaitable[None]]] = []

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.tasks.append(asyncio.create_task(work, name=name))

    def on_stop(self, close: Callable[[], Awaitable[None]]) -> None:
        self.closers.append(close)

    async def stop(self) -> None:
        for close in self.closers:
            await close()
        await stop(*self.tasks)

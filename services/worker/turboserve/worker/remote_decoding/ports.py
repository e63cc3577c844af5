"""What a worker needs of the machine to have decode workers and text workers compute for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from turboserve.worker.transfer.channel import ByteReader, ByteWriter
from turboserve.worker.transfer.interface import Interface

BUFFER_BYTES = 4 << 20
"""Frames that are read at once, bytes: a chunk of a public model has 14 MB."""
T = TypeVar("T")
Connect = Callable[[str, int], Awaitable[tuple[ByteReader, ByteWriter]]]
"""Host, port → a connection. Raises `OSError`."""
CONNECT: Connect = partial(asyncio.open_connection, limit=BUFFER_BYTES)


class LoopWait(Protocol):
    """Waits outside the event loop for work on it."""

    def __call__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, seconds: float) -> T:
        """Run `work` on the loop and return its result.

        Raises its error, `TimeoutError` after so many seconds, and `concurrent.futures.CancelledError`. It is
        canceled then.
        """
        ...


def wait_on_thread(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, seconds: float) -> T:
    """See `LoopWait`. Call it on another thread than the event loop's."""
    running = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return running.result(seconds)
    except (TimeoutError, concurrent.futures.CancelledError):
        running.cancel()
        raise


@dataclass(frozen=True)
class RolePorts:
    """How a worker reaches decode workers and text workers, and waits for them."""

    connect: Connect = CONNECT
    now: Callable[[], float] = time.monotonic
    wait: LoopWait = wait_on_thread
    interface: Interface | None = None
    """At which links to decode workers listen. None: payloads pass over connections."""

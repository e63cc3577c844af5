"""The time limit of a transfer, and a way to abort it from another thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from turboserve.worker.transfer.errors import DeadlineExceededError, TransferAbortedError


class Deadline:
    """A monotonic deadline that a whole transfer shares, and its abort. Thread-safe."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._now = now
        self._until = now() + seconds
        self.shortened = False
        """Whether `shorten` has made it earlier."""
        self._aborted = threading.Event()

    def abort(self) -> None:
        """Abort the transfer: the next call of `left` raises `TransferAbortedError`."""
        self._aborted.set()

    def shorten(self, seconds: float) -> None:
        """End it `seconds` from now, unless it ends earlier. Holds for calls that are under way."""
        until = self._now() + seconds
        if until < self._until:
            self._until, self.seconds, self.shortened = until, seconds, True

    @property
    def passed(self) -> bool:
        return self._now() >= self._until

    def left(self, at_most: float | None = None) -> float:
        """Seconds left, above zero. Raises `TransferAbortedError` or `DeadlineExceededError`."""
        if self._aborted.is_set():
            raise TransferAbortedError("the transfer was aborted")
        left = self._until - self._now()
        if left <= 0:
            raise DeadlineExceededError(f"deadline: exceeded {self.seconds:g} s")
        return left if at_most is None else min(left, at_most)

    def sleep(self, seconds: float) -> None:
        """Wait `seconds`, at most as long as is left. An abort raises `TransferAbortedError` at once."""
        if self._aborted.wait(self.left(seconds)):
            raise TransferAbortedError("the transfer was aborted")


async def ended(work: asyncio.Future[Any]) -> None:
    """Wait until `work` has ended, in any way, even if the caller is canceled repeatedly meanwhile.

    Raises `CancelledError` only after that.
    """
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
    if not work.cancelled():
        work.exception()
    if cancelled:
        raise asyncio.CancelledError

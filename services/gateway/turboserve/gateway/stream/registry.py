"""Open video streams of this process: how many there may be, and their orderly end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from turboserve.gateway.problems.errors import TooManyStreamsError

RETRY_S = 5.0


class Streams:
    """Counts streams. When the gateway stops, `stopping` is set and every stream says goodbye."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open = 0
        self._none = asyncio.Event()
        self._none.set()
        self.stopping = asyncio.Event()

    def check(self) -> None:
        """Raises TooManyStreamsError when there is no place."""
        if self._open >= self._limit:
            raise TooManyStreamsError(
                "this gateway serves no more streams",
                field="streams",
                limit=self._limit,
                retry_after_s=RETRY_S,
            )

    @contextmanager
    def place(self) -> Iterator[None]:
        """A stream's place, for as long as it is open. Raises TooManyStreamsError."""
        self.check()
        self._open += 1
        self._none.clear()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._none.set()

    async def close(self, within_s: float = 2.0) -> None:
        """Ask all streams to end, and wait for them."""
        self.stopping.set()
        try:
            await asyncio.wait_for(self._none.wait(), within_s)
        except TimeoutError:
            return

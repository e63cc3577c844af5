"""One timer for all that is due at one time: to wake up costs more than to send a frame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class FrameTimes:
    """Calls made at the times of frames."""

    def __init__(self) -> None:
        self._waiting: dict[float, list[Callable[[], None]]] = {}

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        """Have `call` called at a time of the event loop, seconds. It cannot be canceled."""
        calls = self._waiting.get(at_s)
        if calls is None:
            self._waiting[at_s] = calls = []
            asyncio.get_running_loop().call_at(at_s, self._wake, at_s)
        calls.append(call)

    def _wake(self, at_s: float) -> None:
        for call in self._waiting.pop(at_s):
            try:
                call()
            except Exception as error:
                # The other calls are those of other viewers.
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a call at the time of frames failed", "exception": error}
                )

"""Calls that wait while the event loop goes on, where production has a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context

from greenlet import getcurrent, greenlet

from turboserve.simulation.runtime.device.clock import DeviceClock


class BlockingCalls:
    """Runs one call at a time. A call may wait in the middle, as a thread may, without a thread.

    The callbacks of a wait belong to the call's process: a frozen process waits longer, and a killed one
    never goes on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: DeviceClock) -> None:
        """`clock`: the engine's. A wait ends no earlier than the computation that it has counted."""
        self._loop, self._clock = loop, clock
        self._waiting: greenlet | None = None
        self._handle: asyncio.Handle | None = None
        """The end of the present wait."""
        self._context: Context | None = None

    def run(self, call: Callable[[], None]) -> None:
        """Run `call` to its end, or to its first wait."""
        self._context = copy_context()
        thread = greenlet(call)
        # A context can be entered once at a time, and the caller is in this one.
        thread.gr_context = copy_context()
        self._switch(thread)

    def wait(self, until: float) -> None:
        """Wait until that time of the loop, or until `wake`. Only within a call."""
        self._waiting = getcurrent()
        assert self._waiting.parent is not None, "no call is under way"
        self._handle = self._loop.call_at(until, self._resume)
        self._waiting.parent.switch()

    def catch_up(self) -> None:
        """Wait until the loop has reached the engine's time. Only within a call."""
        while self._clock.now > self._loop.time():
            self.wait(self._clock.now)

    def wake(self) -> None:
        """End the present wait, if there is one. Any process may call it."""
        if self._waiting is not None and isinstance(self._handle, asyncio.TimerHandle):
            self._handle.cancel()
            self._handle = self._loop.call_soon(self._resume, context=self._context)

    def _resume(self) -> None:
        thread, self._waiting, self._handle = self._waiting, None, None
        assert thread is not None
        self._switch(thread)

    def _switch(self, thread: greenlet) -> None:
        """Let the call go on, up to its next wait."""
        thread.switch()

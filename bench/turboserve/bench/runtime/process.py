"""A simulated operating-system process: what runs in it can be frozen, thawed and killed."""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import Coroutine, Generator
from contextvars import Context, ContextVar
from typing import Any

UNWOUND_AWAITS = 100
"""A coroutine may await so often in its `finally` blocks while it is unwound."""


class ProcessDeadError(BaseException):
    """A killed process called a port, or awaits. Raised while its coroutines are unwound, so that no
    `finally` block of a dead process has an effect on others. Not an `Exception`: nothing may handle it."""


class Process:
    """One life of a process. A process that starts again is another object.

    `VirtualLoop` owns the fields; faults use `VirtualLoop.freeze` and `VirtualLoop.kill`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.frozen_until = 0.0
        """Virtual seconds. Before this time none of its callbacks runs."""
        self.ready: deque[asyncio.Handle] = deque()
        """Callbacks that may run now, in the order of `call_soon`, as in a process of its own."""
        self.tasks: dict[asyncio.Task[object], Context] = {}
        """All tasks that have not ended, and some that have; each with the context that it runs in."""
        self.tasks_limit = 32
        """With more than these, ended ones are forgotten."""

    def check_alive(self) -> None:
        """For ports, at the beginning of each call. Raises `ProcessDeadError` once the process was killed."""
        if not self.alive:
            raise ProcessDeadError(self.name)

    def __repr__(self) -> str:
        return f"Process({self.name!r}, {'alive' if self.alive else 'dead'})"


_current: ContextVar[Process | None] = ContextVar("process", default=None)


def current() -> Process | None:
    """The process whose code runs now; None: the simulation's own."""
    return _current.get()


def process_of(context: Context) -> Process | None:
    """The process that the context belongs to; None: the simulation's own."""
    return context.get(_current)


def enter(process: Process | None) -> None:
    """Make the current context the process's. Tasks and callbacks created from now on inherit it."""
    _current.set(process)


def unwind(coroutine: Coroutine[Any, Any, object] | Generator[Any, Any, object], process: Process) -> None:
    """Have each await of the coroutine raise ProcessDeadError until the coroutine ends.

    `close` does not reach what an async generator awaits, and stops at the first `finally` that awaits.
    """
    with warnings.catch_warnings():
        # A coroutine that a `finally` block made and did not await.
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(UNWOUND_AWAITS):
            try:
                coroutine.throw(ProcessDeadError(process.name))
            except BaseException:
                return

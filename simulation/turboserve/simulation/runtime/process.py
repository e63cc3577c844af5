"""A simulated operating-system process: its code can be frozen, resumed and killed."""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import Coroutine, Generator
from contextvars import Context, ContextVar
from typing import Any

UNWOUND_AWAITS = 100
"""Limit of awaits in the `finally` blocks of one coroutine while it is unwound."""


class ProcessDeadError(BaseException):
    """A killed process called a port or awaits.

    Raised while the coroutines of the process are unwound, so that no `finally` block of a dead process
    affects other processes. Not an `Exception`: no code may handle it.
    """


class Process:
    """One incarnation of a process. A process that starts again is another object.

    `VirtualLoop` owns the fields; faults use `VirtualLoop.freeze` and `VirtualLoop.kill`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.frozen_until = 0.0
        """Virtual time, in seconds, before which none of the process's callbacks runs."""
        self.ready: deque[asyncio.Handle] = deque()
        """Callbacks that may run now, in the order of `call_soon`, as in a process of its own."""
        self.tasks: dict[int, tuple[asyncio.Task[object], Context]] = {}
        """By number: all tasks that have not ended and some that have, each with its context."""
        self.tasks_limit = 32
        """Number of tasks above which ended tasks are discarded."""

    def check_alive(self) -> None:
        """Raise `ProcessDeadError` if the process was killed.

        Ports call this at the beginning of each call.
        """
        if not self.alive:
            raise ProcessDeadError(self.name)

    def __repr__(self) -> str:
        return f"Process({self.name!r}, {'alive' if self.alive else 'dead'})"


CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)
"""The process of a context; None for the simulation's own contexts."""


def current() -> Process | None:
    """Return the process whose code runs now; None for the simulation's own code."""
    return CURRENT.get()


def enter(process: Process | None) -> None:
    """Make the current context the process's. Tasks and callbacks created from now on inherit it."""
    CURRENT.set(process)


def unwind(coroutine: Coroutine[Any, Any, object] | Generator[Any, Any, object], process: Process) -> None:
    """Make each await of the coroutine raise ProcessDeadError until the coroutine ends.

    `close` does not reach the awaits of an async generator, and stops at the first `finally` that awaits.
    """
    with warnings.catch_warnings():
        # Python warns about a coroutine that a `finally` block created and did not await.
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(UNWOUND_AWAITS):
            try:
                coroutine.throw(ProcessDeadError(process.name))
            except BaseException:
                return

"""Callbacks, timers, tasks and futures of the virtual loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Protocol

from turboserve.simulation.runtime.process import Process


class Numbering(Protocol):
    """Source of numbers: the virtual loop."""

    def number(self) -> int:
        """Return the next number."""


class VirtualHandle(asyncio.Handle):
    """A callback with its process."""

    __slots__ = ("process",)

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: Context,
        process: Process,
    ) -> None:
        # The same as asyncio's constructor, without the lookups for debugging.
        self._callback, self._args, self._loop, self._context = callback, args, loop, context
        self._cancelled = False
        self._repr = self._source_traceback = None
        self.process = process


class VirtualTimer(asyncio.TimerHandle):
    """A callback with its time and its process."""

    __slots__ = ("process",)

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: Context,
        process: Process,
    ) -> None:
        self._callback, self._args, self._loop, self._context = callback, args, loop, context
        self._cancelled = False
        self._repr = self._source_traceback = None
        self._when, self._scheduled = when, True
        self.process = process


class VirtualTask(asyncio.Task[Any]):
    """A task whose hash is its number, so that sets of tasks have the same order in every run."""

    __slots__ = ("number",)

    def __init__(
        self,
        number: int,
        work: Coroutine[Any, Any, Any],
        loop: asyncio.AbstractEventLoop,
        context: Context,
    ) -> None:
        # Set before `super().__init__`: asyncio adds the task to a set of all tasks there.
        self.number = number
        super().__init__(work, loop=loop, context=context)

    def __hash__(self) -> int:
        return self.number


class VirtualFuture(asyncio.Future[Any]):
    """A future with the hash rule of `VirtualTask`. Its number is drawn at the first hash, which is rare."""

    __slots__ = ("_number",)

    def __hash__(self) -> int:
        try:
            return self._number
        except AttributeError:
            loop: Numbering = self.get_loop()  # type: ignore[assignment]
            self._number: int = loop.number()
            return self._number

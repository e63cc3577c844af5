"""Threads of the virtual loop: calls that take the time which they count on a clock of their own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol, TypeVar

T = TypeVar("T")


class CountedTime(Protocol):
    """A clock that computations advance (`device.clock.DeviceClock`)."""

    now: float

    def catch_up(self) -> None:
        """Set the time to the loop's, unless it is later."""


class TimedThread(Executor):
    """Passed to `run_in_executor`: a call is over when the loop has reached the clock's time after it."""

    def __init__(self, clock: CountedTime) -> None:
        self._clock = clock

    def run(self, call: Callable[[], T]) -> tuple[T, float]:
        """Return the result of a call, and the time at which it is there."""
        self._clock.catch_up()
        result = call()
        return result, self._clock.now

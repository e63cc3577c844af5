"""Measures how long the broker takes to answer, for readiness.

A connection whose one direction is blocked stays open, and canaries may still arrive on it. Only an answer
shows that both directions work, and how fast.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import nats

from turboserve.bus.client import Bus

INTERVAL_S = 1.0
"""Time between two questions at most, seconds."""
LOOK_S = 0.25
SLOW_S = 0.5
"""From this round trip on, /readyz warns, seconds. A request needs several, so deadlines of 1 to 3 s begin to
fail."""
UNLIMITED_S = 86_400


class RoundTrip:
    """Remembers the newest round trip, and since when an answer is missing. Pure: monotonic seconds."""

    def __init__(self) -> None:
        self._took_s = 0.0
        self._asked_at: float | None = None
        """Time of the first question since the last answer; None: no answer is missing."""
        self._newest = 0.0

    def asked(self, now: float) -> None:
        """Note a question. Earlier ones without an answer are lost, as with their connection."""
        self._newest = now
        if self._asked_at is None:
            self._asked_at = now

    def answered(self, now: float) -> None:
        """Note the answer to the newest question. It took no longer because earlier ones were lost."""
        self._took_s, self._asked_at = now - self._newest, None

    def seconds(self, now: float) -> float:
        """Return how long the last answer took, or how long one has been missing if that is longer."""
        return max(self._took_s, self.missing_s(now))

    def warning(self, now: float) -> str | None:
        """Return the text for /readyz; None while answers come within `SLOW_S`."""
        missing_s = self.missing_s(now)
        if missing_s > max(self._took_s, SLOW_S):
            return f"no answer for {missing_s:.1f} s"
        return f"answers after {self._took_s:.1f} s" if self._took_s > SLOW_S else None

    def missing_s(self, now: float) -> float:
        """Return how long an answer has been missing; 0: none is."""
        return 0.0 if self._asked_at is None else now - self._asked_at


async def measure_round_trips(
    bus: Bus, trip: RoundTrip, monotonic: Callable[[], float], interval_s: float = INTERVAL_S
) -> None:
    """Ask the broker every `interval_s`, and note its answers in `trip`. Never returns."""
    while True:
        trip.asked(monotonic())
        if await _answers(bus):
            trip.answered(monotonic())
            await asyncio.sleep(interval_s)
        else:
            await asyncio.sleep(LOOK_S)


async def _answers(bus: Bus) -> bool:
    """Ask, and wait for the answer. False: there is no connection, or another one since."""
    connection = bus.connection
    if connection is None:
        return False
    question = asyncio.ensure_future(bus.client.flush(UNLIMITED_S))
    try:
        while not question.done():
            if bus.connection != connection:
                return False
            await asyncio.wait({question}, timeout=LOOK_S)
        with contextlib.suppress(TimeoutError, OSError, nats.errors.Error):
            question.result()
            return bus.connection == connection
        return False
    finally:
        question.cancel()

"""Checks whether the broker takes appends: the state store appends canaries, and services receive them.

A broker whose disk is full may stay connected, answer requests and pass its own health check while it stores
nothing. Only a message that was stored and republished proves that a stream works.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

import nats
from nats.aio.msg import Msg as NatsMsg

from turboserve.bus.client import Bus
from turboserve.bus.unreadable import UNREADABLE
from turboserve.contracts.canaries import Canary, SpaceLevel
from turboserve.subject_types import Log
from turboserve.subjects import CANARIES

TICK_S = 1.0
STALL_S = 2.0
"""After a pause of the event loop that exceeds this, received messages may be old. Seconds."""


def canaries_of(service: str) -> tuple[Log, ...]:
    """Return the canaries of the streams that `service` writes or reads."""
    return tuple(log for log in CANARIES if service in (*log.writers, *log.readers))


class CanaryMonitor:
    """Remembers when each stream's newest canary arrived. Pure: callers pass monotonic seconds.

    A process that was stopped finds old canaries in its socket when it continues. Until `settled`, such a
    canary counts as having arrived when the process last ran, which is the earliest possible time.
    """

    def __init__(self, streams: Iterable[str], timeout_s: float, now: float) -> None:
        self.space = SpaceLevel.ENOUGH
        """Space left in the log, by the newest canary."""
        self._timeout_s = timeout_s
        self._heard_at: dict[str, float | None] = dict.fromkeys(streams)
        self._ran_at = now
        self._unsettled_since: float | None = None

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(self._heard_at)

    def ran(self, now: float) -> bool:
        """Note that the process runs. Returns whether messages may be old, until `settled` is called."""
        if now - self._ran_at > STALL_S and self._unsettled_since is None:
            self._unsettled_since = self._ran_at
        self._ran_at = now
        return self._unsettled_since is not None

    def settled(self, now: float) -> None:
        """Note that everything that had arrived during a stop was delivered to handlers."""
        if not self._stalled(now):
            self._unsettled_since = None

    def arrived(self, stream: str, now: float) -> None:
        """Note that a canary of `stream` was delivered."""
        self.ran(now)
        at = now if self._unsettled_since is None else self._unsettled_since
        known = self._heard_at[stream]
        self._heard_at[stream] = at if known is None else max(known, at)

    def takes(self, stream: str, now: float) -> bool:
        """Whether a canary of `stream` arrived within the timeout."""
        at = self._heard_at[stream]
        return at is not None and now - at <= self._timeout_s

    def silent_s(self, stream: str, now: float) -> float | None:
        """Return seconds since the newest canary of `stream`. None: no canary yet."""
        at = self._heard_at[stream]
        return None if at is None else max(0.0, now - at)

    def _stalled(self, now: float) -> bool:
        return now - self._ran_at > STALL_S


async def subscribe_canaries(bus: Bus, monitor: CanaryMonitor, monotonic: Callable[[], float]) -> None:
    """Pass every canary of the monitor's streams to `monitor`."""
    for log in CANARIES:
        if log.stream not in monitor.streams:
            continue

        async def receive(raw: NatsMsg, stream: str = log.stream) -> None:
            monitor.arrived(stream, monotonic())
            with contextlib.suppress(*UNREADABLE):
                monitor.space = Canary.from_bytes(raw.data).space

        assert log.live_pattern is not None
        await bus.client.subscribe(log.live_pattern, cb=receive)


async def watch_canaries(bus: Bus, monitor: CanaryMonitor, monotonic: Callable[[], float]) -> None:
    """Detect stops of this process, and wait until messages from then are delivered. Never returns."""
    while True:
        await asyncio.sleep(TICK_S)
        if not monitor.ran(monotonic()):
            continue
        try:
            # The broker's answer arrives after everything that it sent before.
            await bus.flush()
            # Other tasks deliver the messages that were read.
            await asyncio.sleep(0)
        except (TimeoutError, OSError, nats.errors.Error):
            continue
        monitor.settled(monotonic())

"""Whether the broker takes appends: the state store appends a canary to every stream, and services listen.

A broker whose disk is full may stay connected, answer requests and pass its own health check while it takes
nothing. Only a message that was stored and republished tells that a stream works.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

import nats
from nats.aio.msg import Msg as NatsMsg
from pydantic import ValidationError

from turboserve.bus.client import Bus
from turboserve.contracts.canaries import Canary, SpaceLevel
from turboserve.subjects import CANARIES, Log

TICK_S = 0.5
STALL_S = 2.0
"""An event loop that did not run for this long may hold messages that arrived long ago."""


def canaries_of(service: str) -> tuple[Log, ...]:
    """The canaries of the streams that `service` writes or reads."""
    return tuple(log for log in CANARIES if service in (*log.writers, *log.readers))


class CanaryMonitor:
    """When each stream's canary arrived last. Pure: the shell tells it the time (monotonic seconds).

    A process that was stopped finds old canaries in its socket when it runs again. Until `settled`, a canary
    therefore counts as having arrived when the process last ran, which is the earliest that it can have been.
    """

    def __init__(self, streams: Iterable[str], timeout_s: float, now: float) -> None:
        self.space = SpaceLevel.ENOUGH
        """What the newest canary said of the room that is left in the log."""
        self._timeout_s = timeout_s
        self._heard_at: dict[str, float | None] = dict.fromkeys(streams)
        self._ran_at = now
        self._unsettled_since: float | None = None

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(self._heard_at)

    def ran(self, now: float) -> bool:
        """The process runs; returns whether what arrives next may be old, until `settled` is called."""
        if now - self._ran_at > STALL_S and self._unsettled_since is None:
            self._unsettled_since = self._ran_at
        self._ran_at = now
        return self._unsettled_since is not None

    def settled(self, now: float) -> None:
        """Everything that had arrived while the process was stopped has been handed over."""
        if not self._stalled(now):
            self._unsettled_since = None

    def arrived(self, stream: str, now: float) -> None:
        """A canary of `stream` was handed over."""
        self.ran(now)
        at = now if self._unsettled_since is None else self._unsettled_since
        known = self._heard_at[stream]
        self._heard_at[stream] = at if known is None else max(known, at)

    def takes(self, stream: str, now: float) -> bool:
        """Whether a canary of `stream` arrived within the time-out."""
        at = self._heard_at[stream]
        return at is not None and now - at <= self._timeout_s

    def silent_s(self, stream: str, now: float) -> float | None:
        """Seconds since the newest canary of `stream`; None: there was none yet."""
        at = self._heard_at[stream]
        return None if at is None else max(0.0, now - at)

    def _stalled(self, now: float) -> bool:
        return now - self._ran_at > STALL_S


async def subscribe_canaries(bus: Bus, monitor: CanaryMonitor, monotonic: Callable[[], float]) -> None:
    """Tell `monitor` of every canary of its streams."""
    for log in CANARIES:
        if log.stream not in monitor.streams:
            continue

        async def receive(raw: NatsMsg, stream: str = log.stream) -> None:
            monitor.arrived(stream, monotonic())
            with contextlib.suppress(ValidationError):
                monitor.space = Canary.from_bytes(raw.data).space

        assert log.live_pattern is not None
        await bus.client.subscribe(log.live_pattern, cb=receive)


async def watch_canaries(bus: Bus, monitor: CanaryMonitor, monotonic: Callable[[], float]) -> None:
    """Notice when this process was stopped, and hand over what arrived meanwhile; never returns."""
    while True:
        await asyncio.sleep(TICK_S)
        if not monitor.ran(monotonic()):
            continue
        try:
            # The broker's answer comes behind everything that it had sent before.
            await bus.flush()
            # What was read is handed over by other tasks.
            await asyncio.sleep(0)
        except (TimeoutError, OSError, nats.errors.Error):
            continue
        monitor.settled(monotonic())

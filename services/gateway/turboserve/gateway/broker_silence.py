"""Decides whether this gateway is cut off from the broker, so that its viewers should use another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from turboserve import logs
from turboserve.bus.round_trip import RoundTrip
from turboserve.gateway.context import Streams
from turboserve.service import Runtime

CUT_OFF_S = 2.0
"""The broker has not answered for this long: the gateway is cut off. With short times of failure detection, a
gateway whose NATS server is frozen has a connection to another one before."""
LOOK_S = 0.25

log = logs.get("broker")


class BrokerSilence:
    """Measures how long the broker has been silent while this process ran. Pure: monotonic seconds."""

    def __init__(self, now: float) -> None:
        self.silent_s = 0.0
        self._looked_at = now

    def look(self, missing_s: float, now: float) -> bool:
        """Return whether the gateway is cut off. `missing_s`: how long an answer has been missing.

        The time for which this process was stopped or stuck says nothing about the broker, so a look counts
        for two intervals at most.
        """
        passed_s, self._looked_at = min(now - self._looked_at, 2 * LOOK_S), now
        self.silent_s = min(missing_s, self.silent_s + passed_s)
        return self.silent_s >= CUT_OFF_S

    def warning(self) -> str | None:
        """Return the text for /readyz; None while the gateway is not cut off."""
        if self.silent_s < CUT_OFF_S:
            return None
        return f"no answer of the broker for {self.silent_s:.1f} s: viewers go to another gateway"


def send_viewers_on(runtime: Runtime, streams: Streams) -> None:
    """While this gateway is cut off, end its viewers' streams and be not ready. There are other gateways."""
    silence = BrokerSilence(runtime.clock.monotonic())
    runtime.check("delivery", lambda: not streams.leaving.is_set())
    runtime.warn("delivery", silence.warning)
    runtime.spawn(_watch(silence, runtime.round_trip, streams, runtime.clock.monotonic), "broker silence")


async def _watch(
    silence: BrokerSilence, trip: RoundTrip, streams: Streams, monotonic: Callable[[], float]
) -> None:
    was_cut_off = False
    while True:
        now = monotonic()
        cut_off = silence.look(trip.missing_s(now), now)
        if cut_off and not was_cut_off:
            log.warning("cut off from the broker", streams=streams.count)
            streams.send_on()
        elif was_cut_off and not cut_off:
            log.info("broker answers again")
            streams.admit_again()
        was_cut_off = cut_off
        await asyncio.sleep(LOOK_S)

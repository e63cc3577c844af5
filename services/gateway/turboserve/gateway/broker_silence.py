"""Decides whether this gateway is cut off from the broker, so that its viewers should use another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from turboserve import logs
from turboserve.bus.round_trip import SLOW_S, RoundTrip
from turboserve.gateway.context import Streams
from turboserve.gateway.other_gateways import OtherGateways
from turboserve.service import Runtime

CUT_OFF_S = 2.0
"""The broker has not answered for this long: the gateway is cut off. With short times of failure detection, a
gateway whose NATS server is frozen has a connection to another one before."""
LOOK_S = 0.25
ASK_FROM_S = 1.0
"""From this silence on, the gateway asks the others whether they hear their broker."""
ASK_S = 1.0
CONFIRMATIONS = 2
"""Number of times in succession that another gateway has to hear its broker. A process that was stopped while
the broker fell silent may answer once that it hears it."""

log = logs.get("broker")


class BrokerSilence:
    """Measures how long the broker has been silent while this process ran. Pure: monotonic seconds."""

    def __init__(self, now: float) -> None:
        self.silent_s = 0.0
        self.confirmations = 0
        """Number of times in succession that another gateway answered that it can deliver."""
        self._looked_at = now

    def look(self, missing_s: float, now: float) -> bool:
        """Return whether the gateway is cut off. `missing_s`: how long an answer has been missing.

        The time for which this process was stopped or stuck says nothing about the broker, so a look counts
        for two intervals at most.
        """
        passed_s, self._looked_at = min(now - self._looked_at, 2 * LOOK_S), now
        self.silent_s = min(missing_s, self.silent_s + passed_s)
        if self.silent_s < ASK_FROM_S:
            self.confirmations = 0
        return self.silent_s >= CUT_OFF_S

    def answered(self, another_delivers: bool) -> None:
        """Note whether another gateway can deliver."""
        self.confirmations = self.confirmations + 1 if another_delivers else 0

    @property
    def confirmed(self) -> bool:
        """Whether viewers are better off at another gateway, if this one is cut off."""
        return self.confirmations >= CONFIRMATIONS

    def warning(self) -> str | None:
        """Return the text for /readyz, which other gateways read; None while the broker answers."""
        if self.silent_s < SLOW_S:
            return None
        text = f"no answer of the broker for {self.silent_s:.1f} s"
        if self.silent_s < CUT_OFF_S:
            return text
        if self.confirmed:
            return f"{text}: viewers go to another gateway"
        return f"{text}: viewers wait, as no other gateway answers that it can deliver"


def send_viewers_on(runtime: Runtime, streams: Streams, urls: Sequence[str]) -> None:
    """While this gateway is cut off and another one of `urls` is not, end the viewers' streams and be not
    ready."""
    monotonic = runtime.clock.monotonic
    silence = BrokerSilence(monotonic())
    runtime.check("delivery", lambda: not streams.leaving.is_set())
    runtime.warn("delivery", silence.warning)
    runtime.spawn(watch_silence(silence, runtime.round_trip, streams, monotonic), "broker silence")
    runtime.spawn(ask_others(silence, OtherGateways(urls)), "other gateways")


async def watch_silence(
    silence: BrokerSilence, trip: RoundTrip, streams: Streams, monotonic: Callable[[], float]
) -> None:
    """Send viewers on while this gateway is cut off and another one is not. Never returns."""
    sent_on = False
    while True:
        now = monotonic()
        cut_off = silence.look(trip.missing_s(now), now)
        if cut_off and silence.confirmed and not sent_on:
            log.warning("cut off from the broker", streams=streams.count)
            streams.send_on()
            sent_on = True
        elif sent_on and not cut_off:
            log.info("broker answers again")
            streams.admit_again()
            sent_on = False
        await asyncio.sleep(LOOK_S)


async def ask_others(silence: BrokerSilence, others: OtherGateways) -> None:
    """While the broker is silent, ask the other gateways until one has confirmed. Never returns."""
    while True:
        if silence.silent_s < ASK_FROM_S or silence.confirmed:
            await asyncio.sleep(LOOK_S)
            continue
        silence.answered(await others.can_deliver())
        await asyncio.sleep(ASK_S)

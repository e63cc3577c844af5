"""A canary into every stream, again and again: its acknowledgement tells that the stream takes appends."""

from __future__ import annotations

import asyncio
import json

from turboserve import ids, logs
from turboserve.bus import Bus, append
from turboserve.clock import Clock
from turboserve.contracts.errors import TurboServeError
from turboserve.state_store.settings import Settings
from turboserve.subjects import CANARIES, Log

TTL_INTERVALS = 10
"""A canary stays in the log for this many intervals: the newest is there, and old ones take no space."""
DEADLINE_S = 1.5

log = logs.get("canaries")


class Canaries:
    """Each instance of the state store appends its own."""

    def __init__(self, bus: Bus, clock: Clock, settings: Settings) -> None:
        self._bus, self._clock = bus, clock
        self._interval_s, self._timeout_s = settings.canary_interval_s, settings.canary_timeout_s
        self._ttl_s = max(1, round(TTL_INTERVALS * settings.canary_interval_s))
        self._instance = ids.new_id("canary")
        self._acked_at: dict[str, float] = {}
        self._refusals: dict[str, str] = {}
        self._number = 0

    def refused_by(self) -> dict[str, str]:
        """Why a stream takes nothing, by stream; empty while all take what is appended."""
        now = self._clock.monotonic()
        reasons = dict(self._refusals)
        for canary in CANARIES:
            at = self._acked_at.get(canary.stream)
            if canary.stream not in reasons and (at is None or now - at > self._timeout_s):
                reasons[canary.stream] = f"no canary was acknowledged for {self._timeout_s} s"
        return reasons

    async def run(self) -> None:
        """Append for ever."""
        while True:
            started = self._clock.monotonic()
            await self.append_all()
            await asyncio.sleep(max(0.0, started + self._interval_s - self._clock.monotonic()))

    async def append_all(self) -> None:
        """One canary to every stream; never raises for a broker that refuses or is away."""
        self._number += 1
        await asyncio.gather(*(self._append(canary) for canary in CANARIES))

    async def _append(self, canary: Log) -> None:
        stream = canary.stream
        body = json.dumps({"instance": self._instance, "number": self._number}).encode()
        try:
            await append(
                self._bus,
                canary.every,
                body,
                message_id=f"{self._instance}:{self._number}",
                ttl_s=self._ttl_s,
                deadline_s=DEADLINE_S,
            )
        except TurboServeError as error:
            if stream not in self._refusals:
                log.error("stream takes no appends", stream=stream, error=error.detail)
            self._refusals[stream] = error.detail
            return
        if self._refusals.pop(stream, None) is not None:
            log.info("stream takes appends again", stream=stream)
        self._acked_at[stream] = self._clock.monotonic()

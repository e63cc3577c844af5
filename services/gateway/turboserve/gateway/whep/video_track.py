"""The track of one viewer: hands out encoded frames when their time comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from fractions import Fraction

from aiortc import MediaStreamTrack
from aiortc.mediastreams import MediaStreamError
from av.packet import Packet
from av.stream import Stream

from turboserve.clock import Clock
from turboserve.gateway.whep.pacing import PacedFrame, Pacer

RTP_CLOCK = 90_000
"""Ticks of RTP timestamps per second. Source: RFC 6184, 8.2.1."""
_TIME_BASE = Fraction(1, RTP_CLOCK)


class VideoTrack(MediaStreamTrack):
    """Frames of `pacer`. The sender puts a packet's data into RTP as it is: nothing is encoded."""

    kind = "video"

    def __init__(self, pacer: Pacer, clock: Clock, sending: Callable[[PacedFrame], None]) -> None:
        """`sending` is called with each frame when its time has come."""
        super().__init__()
        self._pacer, self._clock, self._sending = pacer, clock, sending
        self._changed: asyncio.Future[None] | None = None
        """Ends the wait for a frame's time."""
        self.dry = asyncio.Event()
        """Set while no frame waits."""
        self.dry.set()

    def changed(self) -> None:
        """The pacer has another chunk."""
        self.dry.clear()
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def recv(self) -> Packet[Stream]:
        """Return the next frame at its time. Raises MediaStreamError once the track is stopped."""
        loop = asyncio.get_running_loop()
        while (wait_s := self._pacer.wait_s(self._clock.monotonic())) != 0.0:
            if self.readyState != "live":
                raise MediaStreamError
            if wait_s is None:
                self.dry.set()
            self._changed = loop.create_future()
            timer = None if wait_s is None else loop.call_later(wait_s, self.changed)
            try:
                await self._changed
            finally:
                if timer is not None:
                    timer.cancel()
        frame = self._pacer.take()
        self._sending(frame)
        packet = Packet(frame.unit.data)
        packet.pts = round(frame.presentation_s * RTP_CLOCK)
        packet.time_base = _TIME_BASE
        return packet

    def stop(self) -> None:
        """End the track."""
        super().stop()
        self.changed()

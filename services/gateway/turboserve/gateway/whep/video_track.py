"""The track of one viewer: hands out encoded frames when their time comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

from aiortc import MediaStreamTrack, RTCRtpCodecParameters
from aiortc.codecs.h264 import H264Encoder
from aiortc.mediastreams import MediaStreamError
from aiortc.rtcrtpsender import RTCEncodedFrame

from turboserve.clock import Clock
from turboserve.gateway.whep.access_units import AccessUnit
from turboserve.gateway.whep.pacing import PacedFrame, Pacer

RTP_CLOCK = 90_000
"""Ticks of RTP timestamps per second. Source: RFC 6184, 8.2.1."""
PAYLOADS_KEPT = 1_024
NO_AUDIO: Any = None
"""aiortc's level of a frame that is no audio, although it declares an integer."""


@lru_cache(PAYLOADS_KEPT)
def _payloads(unit: AccessUnit) -> list[bytes]:
    """Return the RTP payloads of a frame: viewers of one session share them. Source: RFC 6184, 5."""
    return H264Encoder._packetize(unit.nal_units)


class VideoTrack(MediaStreamTrack):
    """Frames of `pacer`, for a sender whose `_next_encoded_frame` is `next_encoded`."""

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

    async def next_encoded(self, codec: RTCRtpCodecParameters) -> RTCEncodedFrame | None:
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
        return RTCEncodedFrame(_payloads(frame.unit), round(frame.presentation_s * RTP_CLOCK), NO_AUDIO)

    async def recv(self) -> NoReturn:
        """There are no frames to encode. Raises MediaStreamError."""
        raise MediaStreamError

    def stop(self) -> None:
        """End the track."""
        super().stop()
        self.changed()

"""Sends a viewer's frames at their times, in the place of the loops of aiortc's `RTCRtpSender`.

aiortc makes an object of each packet, starts a coroutine for it, and wakes up for reports of its own. Here a
timer wakes the process once per window of `Pacer`, and all that is due in it is sent in one call.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NoReturn

from aioice import ice
from aiortc import MediaStreamTrack, RTCRtpCodecParameters, RTCRtpSender
from aiortc.codecs.h264 import PACKET_MAX, H264Encoder
from aiortc.mediastreams import MediaStreamError
from aiortc.rtcdtlstransport import State
from aiortc.rtcrtpparameters import RTCRtpSendParameters
from aiortc.rtp import RTCP_RTPFB_NACK, AnyRtcpPacket, RtcpByePacket, RtcpRtpfbPacket

from turboserve.clock import Clock
from turboserve.gateway.whep.access_units import AccessUnit
from turboserve.gateway.whep.frame_times import FrameTimes
from turboserve.gateway.whep.incoming import COMPONENT
from turboserve.gateway.whep.pacing import PacedFrame, Pacer
from turboserve.gateway.whep.packet_batch import PacketSender
from turboserve.gateway.whep.rtp_stream import RtpFormat, RtpStream, is_short_extension

PAYLOADS_KEPT = 1_024
_MID = "urn:ietf:params:rtp-hdrext:sdes:mid"
_SEND_TIME = "http://www.webrtc.org/experiments/rtp-hdrext/abs-send-time"


@lru_cache(PAYLOADS_KEPT)
def _payloads(unit: AccessUnit) -> list[bytes]:
    """Return the RTP payloads of a frame: viewers of one session share them. Source: RFC 6184, 5."""
    nal_units = unit.nal_units
    # All frames but key frames are one short unit.
    if len(nal_units) == 1 and len(nal_units[0]) <= PACKET_MAX:
        return list(nal_units)
    return H264Encoder._packetize(nal_units)


class VideoTrack(MediaStreamTrack):
    """What aiortc negotiates. Its frames are sent by a `FrameSender`."""

    kind = "video"

    async def recv(self) -> NoReturn:
        """There are no frames to encode. Raises MediaStreamError."""
        raise MediaStreamError


class FrameSender:
    """Sends the frames of `pacer` over the transport of an aiortc sender."""

    def __init__(
        self, pacer: Pacer, clock: Clock, times: FrameTimes, begins: Callable[[PacedFrame], None]
    ) -> None:
        """`begins` is called with the first frame of each chunk, before it is sent."""
        self._pacer, self._clock, self._times, self._begins = pacer, clock, times, begins
        self._wakes_at: float | None = None
        """The time for which the next call of `changed` was asked for."""
        self._sender: RTCRtpSender | None = None
        self._stream: RtpStream | None = None
        """None before the connection is made and after it is lost."""
        self._pair: ice.CandidatePair | None = None
        """The path of which `_packets` is."""
        self._packets: PacketSender
        self.track = VideoTrack()
        self.dry = asyncio.Event()
        """Set while no frame waits."""
        self.dry.set()

    def attach(self, sender: RTCRtpSender) -> None:
        """Send in the place of an aiortc sender, which keeps the negotiation and the end of the stream."""
        self._sender = sender
        begin = sender.send

        async def send(parameters: RTCRtpSendParameters) -> None:
            await begin(parameters)
            self._stream = RtpStream(_format(sender, parameters), secrets.randbits(15), secrets.randbits(32))
            self.changed()

        sender.send = send  # type: ignore[method-assign]
        sender._next_encoded_frame = self._wait  # type: ignore[method-assign]
        sender._send_rtcp = self._rtcp  # type: ignore[method-assign]
        sender._handle_rtcp_packet = self._feedback  # type: ignore[method-assign]

    def changed(self) -> None:
        """Send what is due: the pacer has another chunk, or the time of frames may have come."""
        if self._stream is None:
            return
        now = self._clock.monotonic()
        try:
            if frames := self._pacer.take(now):
                self._send(self._stream, frames, now)
        finally:
            # Later frames are sent even if these were not.
            at_s = self._pacer.send_at_s
            if at_s is None:
                self.dry.set()
            elif at_s != self._wakes_at:
                self._wakes_at = at_s
                self._times.call_at(at_s, self.changed)

    def queued(self, *, skip: bool = False) -> None:
        """The pacer has another chunk. `skip`: it is shown before what waited."""
        waited = not self.dry.is_set()
        self.dry.clear()
        # While frames wait, the time of the first is awaited.
        if skip or not waited:
            self.changed()

    def stop(self) -> None:
        """Send no more."""
        self._stream = None
        self.track.stop()

    def _send(self, stream: RtpStream, frames: Sequence[PacedFrame], now: float) -> None:
        wall = self._clock.wall()
        for frame in frames:
            if frame.first:
                self._begins(frame)
        packets = stream.frames([(_payloads(one.unit), one.presentation_s) for one in frames], wall)
        # The report's two times are of one moment: that of sending, which may be before the frame's own.
        newest = frames[-1]
        report = stream.report(newest.presentation_s - max(0.0, newest.due_s - now), wall)
        try:
            self._transmit(packets, report)
        except ConnectionError:
            self._stream = None

    def _transmit(self, packets: Sequence[bytes], report: bytes | None = None) -> None:
        """Encrypt and send, with no coroutine for each packet. `report`: RTCP. Raises ConnectionError.

        Over a TURN server, aioice creates a task for each packet.
        """
        assert self._sender is not None
        transport = self._sender.transport
        pair = transport.transport._connection._nominated.get(COMPONENT)
        if pair is None or transport._state is not State.CONNECTED:
            raise ConnectionError("the viewer's connection is lost")
        if pair is not self._pair:
            self._pair, self._packets = pair, PacketSender(pair.protocol.transport, pair.remote_addr)
        self._packets.send(transport._tx_srtp, packets, report)

    async def _wait(self, codec: RTCRtpCodecParameters) -> NoReturn:
        """Take the place of `_next_encoded_frame`: the sender's loop waits here until it is canceled."""
        await asyncio.Event().wait()
        raise MediaStreamError

    async def _rtcp(self, packets: list[AnyRtcpPacket]) -> None:
        """Take the place of `_send_rtcp`: reports are sent with frames. Canceled, the loop says goodbye."""
        if not isinstance(packets[0], RtcpByePacket):
            await asyncio.Event().wait()
        with suppress(ConnectionError):
            self._transmit((), b"".join(map(bytes, packets)))

    async def _feedback(self, packet: AnyRtcpPacket) -> None:
        """Take the place of `_handle_rtcp_packet`."""
        self.repeat(packet)

    def repeat(self, packet: AnyRtcpPacket) -> None:
        """Send again what the viewer has lost, if its `packet` reports that.

        A key frame that it asks for comes with the next chunk. Its bandwidth changes nothing.
        """
        if not isinstance(packet, RtcpRtpfbPacket) or packet.fmt != RTCP_RTPFB_NACK or self._stream is None:
            return
        if self._sender is None or packet.media_ssrc != self._sender._ssrc:
            return
        with suppress(ConnectionError):
            self._transmit(self._stream.retransmissions(packet.lost, self._clock.monotonic()))


def _format(sender: RTCRtpSender, parameters: RTCRtpSendParameters) -> RtpFormat:
    codec = parameters.codecs[0]
    assert codec.payloadType is not None
    again = [
        (sender._rtx_ssrc, one.payloadType)
        for one in parameters.codecs
        if one.name == "rtx"
        and one.parameters.get("apt") == codec.payloadType
        and one.payloadType is not None
    ]
    extensions: dict[str, Any] = {one.uri: one.id for one in parameters.headerExtensions}
    name = parameters.muxId
    mid, send_time = extensions.get(_MID, 0), extensions.get(_SEND_TIME, 0)
    return RtpFormat(
        ssrc=sender._ssrc,
        payload_type=codec.payloadType,
        cname=parameters.rtcp.cname or "",
        retransmission=again[0] if again else None,
        mid=(mid, name) if is_short_extension(mid, len(name.encode())) else None,
        send_time=send_time if is_short_extension(send_time, 3) else None,
    )

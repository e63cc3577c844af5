"""The WebRTC connection of one viewer: ICE, DTLS, one video track, one data channel. Knows no sessions.

Importing this module loads aiortc and FFmpeg, so the gateway does it for the first viewer only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from aioice import ice
from aiortc import (
    RTCBundlePolicy,
    RTCConfiguration,
    RTCDataChannel,
    RTCIceServer,
    RTCPeerConnection,
    RTCRtpSender,
    RTCSessionDescription,
)

from turboserve import logs
from turboserve.clock import Clock
from turboserve.gateway.ice_servers import IceServer
from turboserve.gateway.problems.errors import InvalidOfferError
from turboserve.gateway.whep.frame_sender import FrameSender
from turboserve.gateway.whep.frame_times import FrameTimes
from turboserve.gateway.whep.incoming import Incoming
from turboserve.gateway.whep.messages import send_together
from turboserve.gateway.whep.offer import CheckedOffer

MESSAGES_WAITING = 64
"""Maximum number of a viewer's messages that wait to be handled."""

log = logs.get("whep")
_own_addresses: ContextVar[Sequence[str] | None] = ContextVar("own_addresses", default=None)
_all_addresses = ice.get_host_addresses


def _addresses(use_ipv4: bool, use_ipv6: bool) -> list[str]:
    """Return the addresses that media is sent from: those that the API is bound to.

    aioice takes all of the machine's except loopback.
    """
    chosen = _own_addresses.get()
    if chosen is None:
        return _all_addresses(use_ipv4=use_ipv4, use_ipv6=use_ipv6) or ["127.0.0.1"]
    return list(chosen)


ice.get_host_addresses = _addresses


@contextmanager
def _bound_to(addresses: Sequence[str] | None) -> Iterator[None]:
    token = _own_addresses.set(addresses)
    try:
        yield
    finally:
        _own_addresses.reset(token)


class ViewerConnection:
    """Answers one offer, and lets `frames` send to its viewer."""

    def __init__(
        self, frames: FrameSender, servers: Sequence[IceServer], clock: Clock, times: FrameTimes
    ) -> None:
        self._frames = frames
        self._incoming = Incoming(clock, times, frames.repeat)
        self._sender: RTCRtpSender | None = None
        self._pc = RTCPeerConnection(
            RTCConfiguration(
                iceServers=[RTCIceServer(one.url, one.username, one.credential) for one in servers],
                bundlePolicy=RTCBundlePolicy.MAX_BUNDLE,
            )
        )
        self.connected = asyncio.Event()
        self.gone = asyncio.Event()
        """Set when the viewer has closed the connection, or has not answered for about 8 s."""
        self.opened = asyncio.Event()
        """Set when the viewer's data channel is open."""
        self.messages: asyncio.Queue[str | None] = asyncio.Queue(MESSAGES_WAITING)
        """The viewer's messages; None stands for a binary one."""
        self.flooded = asyncio.Event()
        """Set when the viewer has sent more messages than may wait."""
        self._channel: RTCDataChannel | None = None
        self._pc.on("connectionstatechange", self._state_changed)
        self._pc.on("datachannel", self._channel_opened)

    async def answer(self, offer: CheckedOffer, addresses: Sequence[str] | None) -> str:
        """Return the answer to `offer`, with every candidate. `addresses`: None means all of the machine.

        Raises InvalidOfferError.
        """
        transceiver = self._pc.addTransceiver(self._frames.track, direction="sendonly")
        self._sender = transceiver.sender
        self._frames.attach(self._sender)
        codecs = RTCRtpSender.getCapabilities("video").codecs
        transceiver.setCodecPreferences([codec for codec in codecs if codec.name in ("H264", "rtx")])
        try:
            await self._pc.setRemoteDescription(RTCSessionDescription(offer.sdp, "offer"))
            answer = await self._pc.createAnswer()
            assert answer is not None
            with _bound_to(addresses):
                await self._pc.setLocalDescription(answer)
            self._incoming.silence_consent_checks(self._sender.transport)
        # The parser raises whatever a malformed line makes Python raise.
        except (ValueError, KeyError, IndexError, AssertionError, AttributeError, TypeError) as error:
            log.info("offer refused", error=repr(error))
            raise InvalidOfferError("the offer cannot be read as SDP", field="body") from None
        return self._pc.localDescription.sdp

    @property
    def waiting_bytes(self) -> int:
        """Bytes of messages that the viewer has not acknowledged."""
        return 0 if self._channel is None else self._channel.bufferedAmount

    def send(self, *texts: str) -> None:
        """Send messages. Without an open data channel, nothing is sent.

        The connection ends if the viewer's offer allows no message of such a length.
        """
        if self._channel is None or self._channel.readyState != "open":
            return
        try:
            send_together(self._channel, texts)
        except (ConnectionError, ValueError) as error:
            log.info("message not sent", error=str(error))
            self.gone.set()
        else:
            self._incoming.sent()

    def check(self) -> None:
        """Find out from time to time whether a silent viewer is there. If not, `gone` is set."""
        self._incoming.check()

    async def close(self) -> None:
        await self._incoming.close()
        await self._pc.close()

    def _state_changed(self) -> None:
        match self._pc.connectionState:
            case "connected":
                assert self._sender is not None
                self._incoming.attach(self._sender.transport)
                self.connected.set()
            case "failed" | "closed":
                self.gone.set()

    def _channel_opened(self, channel: RTCDataChannel) -> None:
        if self._channel is not None:
            channel.close()
            return
        self._channel = channel
        channel.on("message", self._received)
        self.opened.set()

    def _received(self, message: str | bytes) -> None:
        try:
            self.messages.put_nowait(message if isinstance(message, str) else None)
        except asyncio.QueueFull:
            self.flooded.set()

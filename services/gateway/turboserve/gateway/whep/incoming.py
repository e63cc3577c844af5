"""What a viewer sends, handled where it arrives. And whether the viewer is there.

aiortc parses each datagram as STUN first, and passes it through a queue and a task. A viewer sends a report
of its reception every second, which says nothing that the gateway needs except that the viewer is there, and
an acknowledgment of each message. Where the system allows it, these wait until frames are sent.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from typing import Any

import pylibsrtp
from aioice import ice, stun
from aiortc.rtcdtlstransport import RTCDtlsTransport
from aiortc.rtcsctptransport import RTCSctpTransport
from aiortc.rtp import RTCP_RR, AnyRtcpPacket, RtcpPacket, is_rtcp
from OpenSSL import SSL

from turboserve import logs
from turboserve.clock import Clock
from turboserve.gateway.whep import consent
from turboserve.gateway.whep.frame_times import FrameTimes
from turboserve.gateway.whep.messages import run_without_waiting, take_acknowledgment
from turboserve.gateway.whep.second_socket import second_socket

SILENT_S = 2.0
"""Silence of a viewer after which it is asked whether it is there, and interval of the questions, seconds."""
EARLY_S = 0.1
"""Checks come at about whole seconds: one that is earlier than `SILENT_S` by less than this asks, too."""
UNANSWERED = 3
"""Questions without an answer after which a viewer is gone. RFC 7675 allows 30 s. Each viewer that has
vanished counts as a viewer of its session, which is generated for it: 8 s."""
COMPONENT = 1
"""Number of the ICE component that carries everything. Source: RFC 8843."""
_FIRST_DTLS, _AFTER_DTLS, _FIRST_RTP, _AFTER_RTP = 20, 64, 128, 192
"""First bytes of DTLS, and of RTP and RTCP. Source: RFC 7983, 7."""
_LARGEST_BYTES = 1_500
READ_S = 0.25
"""Interval at which acknowledgments are read while some are expected, seconds. Frames are sent then, too."""
READ_AT_ONCE = 64
"""Maximum number of datagrams that are read at a time."""
_SHORT_BYTES = 256

log = logs.get("whep")


class Incoming:
    """The datagrams of one viewer."""

    def __init__(self, clock: Clock, times: FrameTimes, feedback: Callable[[AnyRtcpPacket], None]) -> None:
        """`times`: those of all viewers. `feedback` is called with each packet of a report that is more than
        a report of reception."""
        self._clock, self._times, self._feedback = clock, times, feedback
        self._transport: RTCDtlsTransport | None = None
        self._second: socket.socket | None = None
        """Has what need not be handled at once. None: everything is handled where it arrives."""
        self._received: Callable[[bytes | str, tuple[Any, ...]], None] | None = None
        self._report_of_reception: tuple[bytes, tuple[Any, ...]] | None = None
        """The newest that has waited: one of several shows as well that the viewer is there."""
        self._looked_s = 0.0
        self._reads_soon = False
        self._hurries = False
        """Whether messages wait for acknowledgments, so that these are handled where they arrive."""
        self._heard_s = self._asked_s = 0.0
        self._unanswered = 0
        self._asking: asyncio.Task[None] | None = None

    def silence_consent_checks(self, transport: RTCDtlsTransport) -> None:
        """Take the place of aioice's checks, one every few seconds. Call this before the viewer connects."""
        transport.transport._connection.query_consent = _forever  # type: ignore[method-assign]

    def attach(self, transport: RTCDtlsTransport) -> None:
        """Take what comes over the transport, which is connected."""
        self._transport, self._heard_s = transport, self._clock.monotonic()
        for protocol in transport.transport._connection._protocols:
            # asyncio's transport looks the method up for each datagram.
            protocol.datagram_received = self._receiver(protocol)  # type: ignore[method-assign, assignment]
        pair = transport.transport._connection._nominated.get(COMPONENT)
        # Over a TURN server, everything comes from the server.
        if pair is not None and pair.local_candidate.type != "relay":
            self._received = pair.protocol.datagram_received
            self._second = second_socket(pair.protocol.transport.get_extra_info("socket"))

    def sent(self) -> None:
        """Expect the acknowledgment of a message."""
        if self._second is None:
            return
        messages = self._messages_of_viewer()
        if messages is not None and messages._outbound_queue:
            self._hurry(True)
        elif not self._reads_soon:
            self._reads_soon = True
            now = self._clock.monotonic()
            self._times.call_at((math.floor(now / READ_S) + 1) * READ_S, self._read_soon)

    def _read_soon(self) -> None:
        self._reads_soon = False
        self._read(until_acknowledged=True)
        messages = self._messages_of_viewer()
        if messages is not None and messages._sent_queue:
            self.sent()

    def _read(self, *, until_acknowledged: bool = False) -> None:
        """Handle what has waited. `until_acknowledged`: until no acknowledgment is expected."""
        if self._second is None or self._received is None:
            return
        messages = self._messages_of_viewer()
        for _ in range(READ_AT_ONCE):
            if until_acknowledged and messages is not None and not messages._sent_queue:
                break
            try:
                data, address = self._second.recvfrom(_SHORT_BYTES)
            except OSError:
                break
            if not self._is_viewer(address):
                continue
            if data and data[0] >= _FIRST_RTP:
                self._report_of_reception = data, address
            else:
                self._received(data, address)
        if self._hurries and (messages is None or not messages._outbound_queue):
            self._hurry(False)
            if messages is not None and messages._sent_queue:
                self.sent()

    def _is_viewer(self, address: tuple[Any, ...]) -> bool:
        """Whether video is sent to this address. Another one's report must not take the viewer's place."""
        if self._transport is None:
            return False
        pair = self._transport.transport._connection._nominated.get(COMPONENT)
        return pair is not None and pair.remote_addr == address[:2]

    def _hurry(self, hurries: bool) -> None:
        if hurries == self._hurries or self._second is None:
            return
        self._hurries = hurries
        loop = asyncio.get_running_loop()
        if hurries:
            loop.add_reader(self._second, self._read)
        else:
            loop.remove_reader(self._second)

    def _messages_of_viewer(self) -> RTCSctpTransport | None:
        receiver = None if self._transport is None else self._transport._data_receiver
        return receiver if isinstance(receiver, RTCSctpTransport) else None

    def check(self) -> None:
        """Ask a viewer that has been silent whether it is there. If it does not answer, its connection ends.

        A viewer that sends authenticated reports of its reception from the address to which video is sent
        wants to receive, so it is not asked. RFC 7675 knows only answers over STUN.
        """
        now = self._clock.monotonic()
        if self._transport is None or now - self._looked_s < SILENT_S - EARLY_S:
            return
        self._looked_s = now
        self._read()
        if self._report_of_reception is not None and self._received is not None:
            self._received(*self._report_of_reception)
            self._report_of_reception = None
        if now - max(self._heard_s, self._asked_s) < SILENT_S - EARLY_S:
            return
        self._asked_s = now
        self._asking = asyncio.create_task(self._ask(self._transport.transport._connection))

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        if self._second is not None:
            self._hurry(False)
            self._second.close()
            self._second = None

    async def _ask(self, connection: ice.Connection) -> None:
        """Check for consent once. Source: RFC 7675, 5.1."""
        pair = connection._nominated.get(COMPONENT)
        if pair is None or connection.remote_password is None:
            return
        try:
            await pair.protocol.request(
                connection.build_request(pair, nominate=False),
                pair.remote_addr,
                integrity_key=connection.remote_password.encode(),
                retransmissions=0,
            )
        except stun.TransactionError:
            self._unanswered += 1
            if self._unanswered >= UNANSWERED:
                _end(connection)
        else:
            self._heard()

    def _heard(self) -> None:
        self._heard_s, self._unanswered = self._clock.monotonic(), 0

    def _receiver(self, protocol: ice.StunProtocol) -> Callable[[bytes | str, tuple[Any, ...]], None]:
        original = protocol.datagram_received

        def received(data: bytes | str, address: tuple[Any, ...]) -> None:
            assert isinstance(data, bytes)
            first = data[0] if data else 0
            if _FIRST_RTP <= first < _AFTER_RTP:
                self._report(data, address)
            elif _FIRST_DTLS <= first < _AFTER_DTLS:
                self._message(data, protocol.receiver)
            elif not self._consented(data, address, protocol):
                original(data, address)

        return received

    def _consented(self, data: bytes, address: tuple[Any, ...], protocol: ice.StunProtocol) -> bool:
        """Answer the viewer's check of the path over which video is sent. Returns whether it is one."""
        connection = protocol.receiver
        pair = connection._nominated.get(COMPONENT)
        if pair is None or pair.protocol is not protocol or pair.remote_addr != address[:2]:
            return False
        response = consent.answer(data, pair.remote_addr, connection.local_password.encode())
        if response is not None:
            protocol.transport.sendto(response, address)
        return response is not None

    def _message(self, data: bytes, connection: ice.Connection) -> None:
        """Take DTLS, which carries the messages of the data channel and their acknowledgments."""
        assert self._transport is not None
        tls, receiver = self._transport._ssl, self._transport._data_receiver
        assert tls is not None
        tls.bio_write(data)
        try:
            plain = tls.recv(_LARGEST_BYTES)
        except SSL.ZeroReturnError:
            # The viewer says goodbye.
            _end(connection)
            return
        except SSL.Error:
            plain = b""
        try:
            if not plain:
                run_without_waiting(self._transport._write_ssl())
            elif receiver is not None and not (
                isinstance(receiver, RTCSctpTransport) and take_acknowledgment(receiver, plain)
            ):
                run_without_waiting(receiver._handle_data(plain))
        except ConnectionError:
            pass
        except Exception as error:
            # aiortc raises errors of any kind for malformed SCTP, and then ends the connection, too.
            log.info("viewer sent a malformed message", error=repr(error))
            _end(connection)

    def _report(self, data: bytes, address: tuple[Any, ...]) -> None:
        """Take RTCP. A viewer sends no RTP."""
        assert self._transport is not None
        try:
            if not is_rtcp(data):
                return
            plain = self._transport._rx_srtp.unprotect_rtcp(data)
            if self._is_viewer(address):
                self._heard()
            # The first packet is the whole report.
            if plain[1] == RTCP_RR and 4 * (int.from_bytes(plain[2:4], "big") + 1) == len(plain):
                return
            packets = RtcpPacket.parse(plain)
        except (pylibsrtp.Error, ValueError, IndexError):
            return
        for packet in packets:
            self._feedback(packet)


def _end(connection: ice.Connection) -> None:
    """Have aiortc end a connection, as if nothing more came."""
    connection._queue.put_nowait(None)


async def _forever() -> None:
    await asyncio.Event().wait()

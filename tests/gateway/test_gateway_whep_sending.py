"""Packets leave encrypted and in order with one system call, and messages as aiortc would send them."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pylibsrtp
import pytest
from aiortc import RTCDataChannel, RTCDataChannelParameters
from aiortc.rtcsctptransport import RTCSctpTransport, SackChunk, serialize_packet
from hypothesis import example, given
from hypothesis import strategies as st
from pylibsrtp import Policy, Session

from turboserve.gateway.whep import messages, packet_batch
from turboserve.gateway.whep.packet_batch import AT_ONCE, PacketSender

ON_LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux sends several packets with one call"
)
PACKETS = [
    struct.pack(">BBHII", 0x80, 96, number, 0, 7) + bytes([number]) * 40 for number in range(AT_ONCE + 5)
]
REPORT = struct.pack(">BBHIQIII", 0x80, 200, 6, 7, 1, 2, 3, 4)


def ciphers() -> tuple[Session, Session]:
    """Return the sessions of a sender and of its receiver."""
    key = os.urandom(44)
    profile = Policy.SRTP_PROFILE_AEAD_AES_256_GCM
    return (
        Session(Policy(key=key, ssrc_type=Policy.SSRC_ANY_OUTBOUND, srtp_profile=profile)),
        Session(Policy(key=key, ssrc_type=Policy.SSRC_ANY_INBOUND, srtp_profile=profile)),
    )


@asynccontextmanager
async def path(host: str = "127.0.0.1") -> AsyncIterator[tuple[Any, socket.socket]]:
    """Yield a transport, and a socket at another address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as there:
        try:
            there.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        there.settimeout(60.0)
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            asyncio.DatagramProtocol, local_addr=(host, 0)
        )
        try:
            yield transport, there
        finally:
            transport.abort()


class OneByOne:
    """A transport that notes what goes through it."""

    def __init__(self, transport: Any) -> None:
        self._transport, self.count = transport, 0
        self.get_extra_info = transport.get_extra_info
        self.get_write_buffer_size: Callable[[], int] = transport.get_write_buffer_size

    def sendto(self, data: bytes, address: tuple[str, int]) -> None:
        self.count += 1
        self._transport.sendto(data, address)


def arrived(there: socket.socket, count: int, cipher: Session) -> list[bytes]:
    return [cipher.unprotect(there.recv(2_000)) for _ in range(count)]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("count", [1, AT_ONCE, AT_ONCE + 5])
async def test_packets_and_a_report_arrive_in_order(host: str, count: int) -> None:
    ours, theirs = ciphers()
    async with path(host) as (transport, there):
        noted = OneByOne(transport)
        PacketSender(noted, there.getsockname()[:2]).send(ours, PACKETS[:count], REPORT)
        assert arrived(there, count, theirs) == PACKETS[:count]
        assert theirs.unprotect_rtcp(there.recv(2_000)) == REPORT
        assert noted.count == (0 if sys.platform == "linux" else count + 1)


@ON_LINUX
@pytest.mark.parametrize(("taken", "left"), [(3, 7), (0, 10), (-1, 10)])
async def test_what_the_system_does_not_take_waits_in_the_transport(
    monkeypatch: pytest.MonkeyPatch, taken: int, left: int
) -> None:
    ours, theirs = ciphers()
    send = packet_batch._batch._call
    assert send is not None

    def some(descriptor: int, start: int, count: int, flags: int) -> int:
        return send(descriptor, start, min(count, taken), flags) if taken > 0 else taken

    monkeypatch.setattr(packet_batch._batch, "_call", some)
    async with path() as (transport, there):
        noted = OneByOne(transport)
        PacketSender(noted, there.getsockname()).send(ours, PACKETS[:10])
        assert arrived(there, 10, theirs) == PACKETS[:10]
        assert noted.count == left


async def test_packets_stay_behind_those_that_wait() -> None:
    ours, theirs = ciphers()
    async with path() as (transport, there):
        noted = OneByOne(transport)
        noted.get_write_buffer_size = lambda: 1
        PacketSender(noted, there.getsockname()).send(ours, PACKETS[:2])
        assert noted.count == 2
        assert arrived(there, 2, theirs) == PACKETS[:2]


async def test_a_closed_socket_sends_nothing() -> None:
    """Its number may be another socket's by now."""
    ours, _ = ciphers()
    async with path() as (transport, there):
        sender = PacketSender(transport, there.getsockname())
        transport.abort()
        await asyncio.sleep(0)
        with pytest.raises(ConnectionError):
            sender.send(ours, PACKETS[:1])


async def test_a_packet_that_is_too_long_is_refused() -> None:
    ours, _ = ciphers()
    async with path() as (transport, there):
        sender = PacketSender(transport, there.getsockname())
        with pytest.raises(ValueError, match="too long"):
            sender.send(ours, [PACKETS[0] + bytes(1_400)])
        with pytest.raises(pylibsrtp.Error):
            sender.send(ours, [b"x"])


class Wire:
    """The place of the DTLS transport of an association."""

    state, _role = "connected", "server"

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    async def _send_data(self, data: bytes) -> None:
        self.sent.append(data)


def association() -> tuple[RTCSctpTransport, RTCDataChannel, Wire]:
    wire = Wire()
    sctp = RTCSctpTransport(cast(Any, wire))
    sctp._association_state = RTCSctpTransport.State.ESTABLISHED
    sctp._remote_port, sctp._remote_verification_tag, sctp._local_verification_tag = 5000, 77, 88
    # The numbers of chunks overflow.
    sctp._ssthresh = 131_072
    sctp._local_tsn = 0xFFFFFFFE
    sctp._last_sacked_tsn = sctp._advanced_peer_ack_tsn = 0xFFFFFFFD
    channel = RTCDataChannel(sctp, RTCDataChannelParameters(label="messages", id=1), False)
    channel._setReadyState("open")
    sctp._data_channels[1] = channel
    return sctp, channel, wire


def state(sctp: RTCSctpTransport) -> dict[str, object]:
    """Return all that decides what an association does next, except the time to wait."""
    names = (
        "_flight_size _cwnd _ssthresh _partial_bytes_acked _local_tsn _last_sacked_tsn "
        "_advanced_peer_ack_tsn _fast_recovery_exit _fast_recovery_transmit _forward_tsn_chunk "
        "_forward_tsn_streams _outbound_stream_seq"
    )
    kept = {name: getattr(sctp, name) for name in names.split()}
    for name in ("_sent_queue", "_outbound_queue"):
        kept[name] = [{**vars(one), "_sent_time": one._sent_time is None} for one in getattr(sctp, name)]
    kept["unsent"] = [data for _, _, data in sctp._data_channel_queue]
    kept["timer"] = sctp._t3_handle is not None
    kept["measured"] = sctp._srtt is not None
    return kept


def acknowledgment(sctp: RTCSctpTransport, back: int, gap: bool, tag: int = 88) -> bytes:
    """Return the packet of a viewer that has all chunks except the newest `back`, or the newest one alone."""
    chunk = SackChunk()
    chunk.cumulative_tsn = (sctp._local_tsn - 1 - back) % 2**32
    chunk.advertised_rwnd = 100_000
    if gap and back > 1:
        chunk.gaps = [(back, back)]
    return serialize_packet(5000, 5000, tag, chunk)


STEPS = st.lists(
    st.one_of(
        st.lists(st.sampled_from(["a", "b" * 390, "c" * 1_150, "d" * 2_500]), min_size=1, max_size=4),
        st.tuples(st.integers(0, 5), st.booleans()),
        st.sampled_from(["late", "lost"]),
    ),
    max_size=12,
)


FULL = ["c" * 1_150] * 4


@given(STEPS)
@example([FULL, ["a"], (0, False)])
@example([FULL, (0, False)])
@example([["a"], "late", ["a"], (0, False)])
@example([["a"], ["a"], (2, True), ["a"], (3, True), ["a"], (4, True), ["a"], (0, False), ["a"]])
def test_messages_go_and_are_acknowledged_as_with_aiortc_alone(steps: list[Any]) -> None:
    async def run() -> None:
        (ours, channel, wire), (theirs, other, expected) = association(), association()
        for step in steps:
            match step:
                case list():
                    messages.send_together(channel, step)
                    messages._queue(other, [text.encode() for text in step])
                case (back, gap) if theirs._sent_queue and back <= len(theirs._sent_queue):
                    packet = acknowledgment(theirs, back + len(theirs._outbound_queue), gap)
                    if not messages.take_acknowledgment(ours, packet):
                        await ours._handle_data(packet)
                    await theirs._handle_data(packet)
                case "late" | "lost" if theirs._t3_handle is not None:
                    for one in (ours, theirs):
                        assert one._t3_handle is not None
                        one._t3_cancel()
                        one._t3_expired()
                    # What is sent again is sent by a task.
                    if step == "lost":
                        await asyncio.sleep(0)
            assert state(ours) == state(theirs)
            assert wire.sent == expected.sent
        for one in (ours, theirs):
            one._t3_cancel()

    asyncio.run(run())


async def test_an_acknowledgment_that_is_no_whole_one_is_left_to_aiortc() -> None:
    ours, channel, wire = association()
    messages.send_together(channel, ["a", "b", "c"])
    assert len(wire.sent) == 1
    whole = acknowledgment(ours, 0, gap=False)
    for place in range(12):
        assert not messages.take_acknowledgment(
            ours, whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        )
    assert not messages.take_acknowledgment(ours, acknowledgment(ours, 0, gap=False, tag=89))
    assert not messages.take_acknowledgment(ours, acknowledgment(ours, 1, gap=False))
    assert not messages.take_acknowledgment(ours, acknowledgment(ours, 2, gap=True))
    assert len(ours._sent_queue) == 3
    assert messages.take_acknowledgment(ours, whole)
    assert not ours._sent_queue
    assert ours._t3_handle is None
    # It came once more.
    assert not messages.take_acknowledgment(ours, whole)

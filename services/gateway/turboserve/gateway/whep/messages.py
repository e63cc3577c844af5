"""Sends a viewer's messages over aiortc's data channel: those of one moment together, without a task.

Almost always, messages can be sent at once, and one acknowledgment confirms them all. For these cases, the
state of aiortc's association is advanced here. What is lost, and what has to wait, is left to aiortc.

Source: RFC 9260 (SCTP), 3.3 and 6; RFC 8831 (data channels), 6.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

from aiortc import RTCDataChannel
from aiortc.rtcsctptransport import (
    SCTP_COMMON_HEADER_LENGTH,
    SCTP_DATA_FIRST_FRAG,
    SCTP_DATA_LAST_FRAG,
    SCTP_MAX_PACKET_LENGTH,
    USERDATA_MAX_LENGTH,
    WEBRTC_STRING,
    Chunk,
    DataChunk,
    RTCSctpTransport,
    SackChunk,
    tsn_plus_one,
)
from aiortc.utils import uint16_add
from google_crc32c import value as crc32c

_LARGEST_BYTES = SCTP_MAX_PACKET_LENGTH - SCTP_COMMON_HEADER_LENGTH
_BURST_BYTES = 4 * USERDATA_MAX_LENGTH
"""What may be sent at once. Source: RFC 9260, 6.1."""
_PORTS = struct.Struct(">HHI")
_CHECKSUM = struct.Struct("<I")
_ACKNOWLEDGMENT = struct.Struct(">4xIxxxxBxHIIHH")
_WHOLE = SCTP_DATA_FIRST_FRAG | SCTP_DATA_LAST_FRAG
"""Flags of a chunk that is a whole message."""


class _Bundle(Chunk):
    """Several chunks of SCTP in one packet, which is acknowledged once. Source: RFC 9260, 6.10."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        super().__init__()
        self._parts = parts

    def __bytes__(self) -> bytes:
        return b"".join(self._parts)


def send_together(channel: RTCDataChannel, texts: Sequence[str]) -> None:
    """Send messages as `channel.send` does. Raises ConnectionError, ValueError for a long one."""
    sctp = channel.transport
    messages = [text.encode() for text in texts]
    largest = sctp._remote_max_message_size
    for data in messages:
        if largest and len(data) > largest:
            raise ValueError(f"a message of {len(data)} bytes: the viewer takes {largest}")
    if _need_not_wait(channel, messages):
        chunks = [bytes(_sent_now(channel, data)) for data in messages]
        if sctp._t3_handle is None:
            sctp._t3_start()
        for parts in _packets(chunks):
            _send_packet(sctp, b"".join(parts))
    else:
        _queue(channel, messages)


def _need_not_wait(channel: RTCDataChannel, messages: Sequence[bytes]) -> bool:
    """Whether each message fits into one chunk, and the viewer's acknowledgments allow all of them now."""
    sctp = channel.transport
    total = sum(map(len, messages))
    return (
        0 < total <= _BURST_BYTES
        and sctp._flight_size + total <= sctp._cwnd
        and all(0 < len(data) <= USERDATA_MAX_LENGTH for data in messages)
        and sctp._association_state is RTCSctpTransport.State.ESTABLISHED
        and channel.id is not None
        and channel.ordered
        and channel.maxRetransmits is None
        and channel.maxPacketLifeTime is None
        and not (sctp._data_channel_queue or sctp._outbound_queue or sctp._reconfig_queue)
        and _nothing_lost(sctp)
    )


def _nothing_lost(sctp: RTCSctpTransport) -> bool:
    return (
        sctp._fast_recovery_exit is None
        and sctp._forward_tsn_chunk is None
        and not any(one._retransmit or one._abandoned for one in sctp._sent_queue)
    )


def _sent_now(channel: RTCDataChannel, data: bytes) -> DataChunk:
    """Return the chunk of a message that is sent now, for which an acknowledgment is awaited."""
    sctp, stream = channel.transport, channel.id
    assert stream is not None
    chunk = DataChunk(_WHOLE)
    chunk.tsn, chunk.stream_id, chunk.protocol, chunk.user_data = sctp._local_tsn, stream, WEBRTC_STRING, data
    chunk.stream_seq = sctp._outbound_stream_seq.get(stream, 0)
    chunk._book_size, chunk._sent_count, chunk._sent_time = len(data), 1, time.time()
    chunk._in_flight, chunk._acked, chunk._abandoned, chunk._retransmit = True, False, False, False
    chunk._misses, chunk._expiry, chunk._max_retransmits = 0, None, None
    sctp._outbound_stream_seq[stream] = uint16_add(chunk.stream_seq, 1)
    sctp._local_tsn = tsn_plus_one(sctp._local_tsn)
    sctp._flight_size += len(data)
    sctp._sent_queue.append(chunk)
    return chunk


def _send_packet(sctp: RTCSctpTransport, body: bytes) -> None:
    head = _PORTS.pack(sctp._local_port, sctp._remote_port, sctp._remote_verification_tag)
    checksum = _CHECKSUM.pack(crc32c(head + bytes(_CHECKSUM.size) + body))
    run_without_waiting(sctp.transport._send_data(head + checksum + body))


def take_acknowledgment(sctp: RTCSctpTransport, packet: bytes) -> bool:
    """Take a packet that acknowledges all that was sent, and says nothing else. Returns whether it is one."""
    sent = sctp._sent_queue
    if len(packet) != _ACKNOWLEDGMENT.size or not sent or sctp._data_channel_queue or sctp._outbound_queue:
        return False
    tag, kind, length, number, _, gaps, repeated = _ACKNOWLEDGMENT.unpack(packet)
    plain = kind == SackChunk.type and length == len(packet) - SCTP_COMMON_HEADER_LENGTH
    if not plain or gaps or repeated or tag != sctp._local_verification_tag or number != sent[-1].tsn:
        return False
    # The congestion window grows only if it was used up.
    if sctp._flight_size >= sctp._cwnd or sctp._reconfig_queue or not _nothing_lost(sctp):
        return False
    if packet[8:12] != _CHECKSUM.pack(crc32c(packet[:8] + bytes(_CHECKSUM.size) + packet[12:])):
        return False
    if sent[0]._sent_count == 1 and sent[0]._sent_time is not None:
        sctp._update_rto(time.time() - sent[0]._sent_time)
    sent.clear()
    sctp._flight_size = 0
    sctp._last_sacked_tsn = sctp._advanced_peer_ack_tsn = number
    sctp._forward_tsn_streams.clear()
    sctp._t3_cancel()
    return True


def _queue(channel: RTCDataChannel, messages: Sequence[bytes]) -> None:
    """Have aiortc send messages, and bundle what it sends now."""
    sctp, collected = channel.transport, []
    for data in messages:
        channel._addBufferedAmount(len(data))
        sctp._data_channel_queue.append((channel, WEBRTC_STRING, data))

    async def collect(chunk: Chunk) -> None:
        collected.append(bytes(chunk))

    send = sctp._send_chunk
    sctp._send_chunk = collect  # type: ignore[method-assign]
    try:
        run_without_waiting(sctp._data_channel_flush())
    finally:
        sctp._send_chunk = send  # type: ignore[method-assign]
    for parts in _packets(collected):
        run_without_waiting(send(_Bundle(parts)))


def _packets(chunks: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Divide chunks into packets that are not too long."""
    parts: list[bytes] = []
    size = 0
    for chunk in chunks:
        if parts and size + len(chunk) > _LARGEST_BYTES:
            yield parts
            parts, size = [], 0
        parts.append(chunk)
        size += len(chunk)
    if parts:
        yield parts


def run_without_waiting(step: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine of aiortc that encrypts and writes to a socket, and waits for nothing.

    Raises what it raises, and RuntimeError if it does wait.
    """
    try:
        step.send(None)
    except StopIteration:
        return
    step.close()
    raise RuntimeError("aiortc waits before it sends")

"""Sends a viewer's messages over aiortc's data channel: those of one moment together, without a task."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

from aiortc import RTCDataChannel
from aiortc.rtcsctptransport import SCTP_COMMON_HEADER_LENGTH, SCTP_MAX_PACKET_LENGTH, WEBRTC_STRING, Chunk

_LARGEST_BYTES = SCTP_MAX_PACKET_LENGTH - SCTP_COMMON_HEADER_LENGTH


class _Bundle(Chunk):
    """Several chunks of SCTP in one packet, which is acknowledged once. Source: RFC 9260, 6.10."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        super().__init__()
        self._parts = parts

    def __bytes__(self) -> bytes:
        return b"".join(self._parts)


def send_together(channel: RTCDataChannel, texts: Sequence[str]) -> None:
    """Send messages as `channel.send` does. Raises ConnectionError, ValueError for a long one."""
    sctp, collected = channel.transport, []
    largest = sctp._remote_max_message_size
    for text in texts:
        data = text.encode()
        if largest and len(data) > largest:
            raise ValueError(f"a message of {len(data)} bytes: the viewer takes {largest}")
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

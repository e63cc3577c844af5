"""The RTP packets of one viewer's video, as bytes, and what accompanies them: retransmissions and reports.

Pure: methods take Unix seconds. The payloads are those of all viewers of a session; only headers differ.

Source: RFC 3550 (RTP, RTCP), RFC 4588 (retransmission), RFC 8285 (header extensions).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

RTP_CLOCK = 90_000
"""Ticks of RTP timestamps per second. Source: RFC 6184, 8.2.1."""
HISTORY = 256
"""Packets that are kept for retransmission: several seconds of video."""
REPORT_S = 5.0
"""Least interval between two sender reports, seconds. Source: RFC 3550, 6.2."""

_HEADER = struct.Struct(">BBHII")
_REPORT = struct.Struct(">BBHIQIII")
_NTP_EPOCH_S = 2_208_988_800
"""Seconds from 1900 to 1970."""
_VERSION, _EXTENDED, _MARKER = 0x80, 0x10, 0x80
_ONE_BYTE_EXTENSIONS = 0xBEDE
_LARGEST_ID, _LONGEST_VALUE = 14, 16
"""Of an extension with a header of one byte."""
_SENDER_REPORT, _SOURCE_DESCRIPTION, _CNAME = 200, 202, 1
_UINT16, _UINT24, _UINT32 = 0xFFFF, 0xFFFFFF, 0xFFFFFFFF


@dataclass(frozen=True)
class RtpFormat:
    """What the offer and its answer say of the video's packets."""

    ssrc: int
    payload_type: int
    cname: str
    retransmission: tuple[int, int] | None = None
    """SSRC and payload type of retransmitted packets. None: they are sent as they were."""
    mid: tuple[int, str] | None = None
    """Identifier of the extension that names the media section, and its name."""
    send_time: int | None = None
    """Identifier of the extension with the time of sending (`abs-send-time`)."""


class RtpStream:
    """Numbers the packets of one viewer, and keeps the newest."""

    def __init__(self, form: RtpFormat, sequence: int, timestamp: int) -> None:
        """`sequence`, `timestamp`: of the first packet. They should be random: RFC 3550, 5.1."""
        self._form = form
        self._sequence, self._origin = sequence & _UINT16, timestamp
        self._again = sequence & _UINT16
        """Sequence number of the next retransmission."""
        self._kept: dict[int, bytes] = {}
        self._again_since, self._again_left = -math.inf, 0
        self._packets = self._octets = 0
        self._reported_at = 0.0
        self._head, self._tail = _extensions(form)

    def frames(self, frames: Iterable[tuple[Sequence[bytes], float]], now: float) -> list[bytes]:
        """Return the packets of frames that are sent together.

        `frames`: the payloads of each, and its presentation time since the first frame, seconds.
        """
        form, kept, origin, sequence = self._form, self._kept, self._origin, self._sequence
        extensions = self._head
        if form.send_time is not None:
            extensions += (int(now * (1 << 18)) & _UINT24).to_bytes(3, "big")
        extensions += self._tail
        first, ssrc, octets = _VERSION | (_EXTENDED if extensions else 0), form.ssrc, 0
        packets = []
        for payloads, presentation_s in frames:
            timestamp = (origin + round(presentation_s * RTP_CLOCK)) & _UINT32
            kind, left = form.payload_type, len(payloads)
            for payload in payloads:
                left -= 1
                if not left:
                    kind |= _MARKER
                packet = _HEADER.pack(first, kind, sequence, timestamp, ssrc) + extensions + payload
                packets.append(packet)
                kept[sequence % HISTORY] = packet
                octets += len(payload)
                sequence = (sequence + 1) & _UINT16
        self._sequence = sequence
        self._octets += octets
        self._packets += len(packets)
        return packets

    def retransmissions(self, lost: Iterable[int], now: float) -> list[bytes]:
        """Return packets that a viewer has lost, by their sequence numbers, as far as they are kept.

        A number that is repeated counts once. In a second of `now`, at most `HISTORY` packets are sent again:
        one report may name thousands.
        """
        if now - self._again_since >= 1.0:
            self._again_since, self._again_left = now, HISTORY
        packets = (self._retransmission(sequence) for sequence in dict.fromkeys(lost))
        found = list(islice((packet for packet in packets if packet is not None), self._again_left))
        self._again_left -= len(found)
        return found

    def _retransmission(self, sequence: int) -> bytes | None:
        """Return the packet of this sequence number for another try; None: it is not kept."""
        packet = self._kept.get(sequence % HISTORY)
        if packet is None or int.from_bytes(packet[2:4], "big") != sequence:
            return None
        if self._form.retransmission is None:
            return packet
        ssrc, payload_type = self._form.retransmission
        first, kind, _, timestamp, _ = _HEADER.unpack_from(packet)
        body = _HEADER.size + len(self._head) + len(self._tail) + 3 * (self._form.send_time is not None)
        header = _HEADER.pack(first, kind & _MARKER | payload_type, self._again, timestamp, ssrc)
        self._again = (self._again + 1) & _UINT16
        return header + packet[_HEADER.size : body] + packet[2:4] + packet[body:]

    def report(self, presentation_s: float, now: float) -> bytes | None:
        """Return a sender report for a frame that is sent now; None: the last one is recent."""
        if now - self._reported_at < REPORT_S:
            return None
        self._reported_at = now
        form = self._form
        timestamp = (self._origin + round(presentation_s * RTP_CLOCK)) & _UINT32
        ntp = int((now + _NTP_EPOCH_S) * (1 << 32)) & 0xFFFFFFFFFFFFFFFF
        counts = self._packets & _UINT32, self._octets & _UINT32
        sender = _REPORT.pack(_VERSION, _SENDER_REPORT, 6, form.ssrc, ntp, timestamp, *counts)
        name = form.cname.encode()[:255]
        chunk = struct.pack(">IBB", form.ssrc, _CNAME, len(name)) + name + b"\0"
        chunk += bytes(-len(chunk) % 4)
        return sender + struct.pack(">BBH", _VERSION | 1, _SOURCE_DESCRIPTION, len(chunk) // 4) + chunk


def _extensions(form: RtpFormat) -> tuple[bytes, bytes]:
    """Return the bytes of the extensions before the time of sending, and those after it."""
    mid = b""
    if form.mid is not None:
        identifier, name = form.mid
        mid = bytes([identifier << 4 | len(name) - 1]) + name.encode()
    time = b"" if form.send_time is None else bytes([form.send_time << 4 | 2])
    size = len(mid) + len(time) + 3 * bool(time)
    if not size:
        return b"", b""
    padding = -size % 4
    # The time stands last, before the padding.
    head = struct.pack(">HH", _ONE_BYTE_EXTENSIONS, (size + padding) // 4) + mid + time
    return head, bytes(padding)


def is_short_extension(identifier: int, value_bytes: int) -> bool:
    """Whether an extension fits a header of one byte. `value_bytes`: the length of its value."""
    return 1 <= identifier <= _LARGEST_ID and 1 <= value_bytes <= _LONGEST_VALUE

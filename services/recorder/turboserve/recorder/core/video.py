"""Boxes of fragmented MP4: a segment's place on the timeline, and an index at the head of a file.

Source: ISO/IEC 14496-12, 8.8.12 (`tfdt`) and 8.16.3 (`sidx`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from fractions import Fraction

from turboserve.recorder.core.segments import Part, Segment

_HEADER = 8
REFERENCES_LIMIT = 65_535
"""Maximum number of references in one `sidx` box."""


class VideoFormatError(ValueError):
    """Bytes that are no fragmented MP4."""


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield type, start of the content and end of each box of one level."""
    while start < end:
        size = int.from_bytes(data[start : start + 4], "big")
        if size < _HEADER or start + size > end:
            raise VideoFormatError(f"box at byte {start}: {size} bytes do not fit in {end - start}")
        yield data[start + 4 : start + _HEADER], start + _HEADER, start + size
        start += size


def _all(data: bytes, *path: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and end of the content of every box at `path`."""

    def below(start: int, end: int, depth: int) -> Iterator[tuple[int, int]]:
        for kind, inner, outer in _boxes(data, start, end):
            if kind == path[depth]:
                if depth + 1 == len(path):
                    yield inner, outer
                else:
                    yield from below(inner, outer, depth + 1)

    yield from below(0, len(data), 0)


def timescale_of(init: bytes) -> int:
    """Return the ticks per second of an init segment's track. Raises VideoFormatError."""
    for start, _ in _all(init, b"moov", b"trak", b"mdia", b"mdhd"):
        found: int = struct.unpack_from(">I", init, start + (20 if init[start] == 1 else 12))[0]
        if found:
            return found
    raise VideoFormatError("the init segment has no track with a timescale")


def shifted(fragments: bytes, ticks: int) -> bytes:
    """Return fragments that play `ticks` later. Their size stays. Raises VideoFormatError."""
    if ticks == 0:
        return fragments
    out = bytearray(fragments)
    for start, end in _all(fragments, b"moof", b"traf", b"tfdt"):
        form = ">Q" if fragments[start] == 1 else ">I"
        if end - start < 4 + struct.calcsize(form):
            raise VideoFormatError(f"tfdt at byte {start}: too short")
        at = struct.unpack_from(form, fragments, start + 4)[0] + ticks
        if at < 0:
            raise VideoFormatError(f"tfdt at byte {start}: {ticks} ticks lead before 0")
        struct.pack_into(form, out, start + 4, at)
    return bytes(out)


def shift_ticks(segment: Segment, start_frame: int, timescale: int) -> int:
    """Return by how many ticks a segment moves, so that it begins at `start_frame` of its video."""
    return _ticks(start_frame - segment.first_frame, segment.fps, timescale)


def segment_index(part: Part, timescale: int) -> bytes:
    """Return a `sidx` box with the size and length of each segment, by which players seek.

    A video with more segments than the box takes gets one reference for several.
    """
    together = -(-len(part.segments) // REFERENCES_LIMIT)
    groups = [part.segments[n : n + together] for n in range(0, len(part.segments), together)]
    body = struct.pack(">IIIIIHH", 0, 1, timescale, 0, 0, 0, len(groups))
    done_frames = done_ticks = 0
    for group in groups:
        done_frames += sum(segment.frames for segment in group)
        ticks = _ticks(done_frames, group[0].fps, timescale)
        size = sum(segment.size for segment in group)
        # Each segment begins with a key frame (a stream access point of type 1).
        body += struct.pack(">III", size & 0x7FFF_FFFF, ticks - done_ticks, 0x9000_0000)
        done_ticks = ticks
    return struct.pack(">I", _HEADER + len(body)) + b"sidx" + body


def _ticks(frames: int, fps: float, timescale: int) -> int:
    # Rates such as 30000/1001 are no exact floats.
    return round(frames * timescale / Fraction(fps).limit_denominator(1_001))

"""Takes a chunk apart into H.264 access units, as WebRTC sends them. Nothing is decoded or encoded.

Source: ISO/IEC 14496-12, 8.8 (movie fragments); ISO/IEC 14496-15, 5.3.3 (`avcC`); ITU-T H.264, 7.4.1.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache

from turboserve.static_frozen import statically_frozen
from turboserve.wording import counted

TRACKS_KEPT = 64
"""Init segments of which is kept what they say: a session's chunks have the same."""
_HEADER = 8
_STSD_FIELDS = 8
_VISUAL_FIELDS = 78
_KEY_FRAME, _SUPPLEMENT, _DELIMITER = 5, 6, 9
"""Types of NAL units: a slice of a key frame, supplemental information, and the start of an access unit."""
_DATA_OFFSET, _FIRST_FLAGS, _DURATION, _SIZE, _FLAGS, _COMPOSITION = 0x1, 0x4, 0x100, 0x200, 0x400, 0x800
_BASE_OFFSET, _DESCRIPTION, _DEFAULT_DURATION, _DEFAULT_SIZE = 0x1, 0x2, 0x8, 0x10


class ChunkFormatError(ValueError):
    """Bytes that are no chunk of H.264 video in fragmented MP4."""


@statically_frozen(eq=False)
class AccessUnit:
    """One encoded frame. Two of them are equal only if they are the same object."""

    nal_units: tuple[bytes, ...]
    """Those of a key frame begin with its parameter sets."""
    start_s: float
    """Media time, seconds."""
    duration_s: float


@statically_frozen(eq=False)
class _Track:
    timescale: int
    parameter_sets: tuple[bytes, ...]
    length_bytes: int


def access_units(init: bytes, fragment: bytes) -> tuple[AccessUnit, ...]:
    """Return the access units of a chunk in the order of decoding. Raises ChunkFormatError."""
    try:
        track = _track(init)
        return tuple(_units(track, fragment))
    except (struct.error, IndexError) as error:
        raise ChunkFormatError(f"the chunk ends early: {error}") from None


def _units(track: _Track, fragment: bytes) -> Iterator[AccessUnit]:
    for kind, moof, moof_end in _boxes(fragment, 0, len(fragment)):
        if kind != b"moof":
            continue
        traf, traf_end = _one(fragment, moof, moof_end, b"traf")
        start, _ = _one(fragment, traf, traf_end, b"tfdt")
        ticks = struct.unpack_from(">Q" if fragment[start] == 1 else ">I", fragment, start + 4)[0]
        offset, samples = _samples(fragment, traf, traf_end)
        position = moof - _HEADER + offset
        for size, duration in samples:
            nal_units = _nal_units(track, fragment, position, position + size)
            yield AccessUnit(nal_units, ticks / track.timescale, duration / track.timescale)
            position += size
            ticks += duration


def _samples(data: bytes, start: int, end: int) -> tuple[int, list[tuple[int, int]]]:
    """Return where the samples of a `traf` begin after its `moof`, and the size and duration of each."""
    at, _ = _one(data, start, end, b"tfhd")
    flags = struct.unpack_from(">I", data, at)[0] & 0xFFFFFF
    at += 8 + 8 * bool(flags & _BASE_OFFSET) + 4 * bool(flags & _DESCRIPTION)
    duration = size = 0
    if flags & _DEFAULT_DURATION:
        duration, at = struct.unpack_from(">I", data, at)[0], at + 4
    if flags & _DEFAULT_SIZE:
        size = struct.unpack_from(">I", data, at)[0]
    at, run_end = _one(data, start, end, b"trun")
    flags, count = struct.unpack_from(">II", data, at)
    if not flags & _DATA_OFFSET:
        raise ChunkFormatError("trun: without the offset of its data")
    offset = struct.unpack_from(">i", data, at + 8)[0]
    at += 12 + 4 * bool(flags & _FIRST_FLAGS)
    own_duration, own_size = bool(flags & _DURATION), bool(flags & _SIZE)
    width = 4 * (own_duration + own_size + bool(flags & _FLAGS) + bool(flags & _COMPOSITION))
    if at + width * count > run_end or count > len(data):
        raise ChunkFormatError(f"trun: {counted(count, 'sample does', 'samples do')} not fit")
    samples = []
    for row in range(at, at + width * count, width) if width else [at] * count:
        samples.append(
            (
                struct.unpack_from(">I", data, row + 4 * own_duration)[0] if own_size else size,
                struct.unpack_from(">I", data, row)[0] if own_duration else duration,
            )
        )
    return offset, samples


def _nal_units(track: _Track, data: bytes, start: int, end: int) -> tuple[bytes, ...]:
    if end > len(data):
        raise ChunkFormatError(f"a sample ends at byte {end} of {len(data)}")
    parts: list[bytes] = []
    while start < end:
        size = int.from_bytes(data[start : start + track.length_bytes], "big")
        start += track.length_bytes
        if size == 0 or start + size > end:
            raise ChunkFormatError(f"a NAL unit of {size} bytes does not fit")
        kind = data[start] & 0x1F
        # Decoders need neither, and the encoder's description of itself fills half a packet.
        if kind not in (_SUPPLEMENT, _DELIMITER):
            if kind == _KEY_FRAME and not parts:
                parts += track.parameter_sets
            parts.append(data[start : start + size])
        start += size
    return tuple(parts)


@lru_cache(TRACKS_KEPT)
def _track(init: bytes) -> _Track:
    media, media_end = 0, len(init)
    for kind in (b"moov", b"trak", b"mdia"):
        media, media_end = _one(init, media, media_end, kind)
    at, _ = _one(init, media, media_end, b"mdhd")
    timescale = struct.unpack_from(">I", init, at + (20 if init[at] == 1 else 12))[0]
    if not timescale:
        raise ChunkFormatError("mdhd: a timescale of 0")
    start, end = media, media_end
    for kind, fields in ((b"minf", 0), (b"stbl", 0), (b"stsd", _STSD_FIELDS), (b"avc1", _VISUAL_FIELDS)):
        start, end = _one(init, start, end, kind)
        start += fields
    at, end = _one(init, start, end, b"avcC")
    length_bytes = (init[at + 4] & 0x3) + 1
    sets: list[bytes] = []
    at += 5
    for mask in (0x1F, 0xFF):
        count, at = init[at] & mask, at + 1
        for _ in range(count):
            size = struct.unpack_from(">H", init, at)[0]
            if at + 2 + size > end:
                raise ChunkFormatError(f"avcC: a parameter set of {size} bytes does not fit")
            sets.append(init[at + 2 : at + 2 + size])
            at += 2 + size
    return _Track(timescale, tuple(sets), length_bytes)


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield type, start of the content and end of each box of one level."""
    while start < end:
        size = int.from_bytes(data[start : start + 4], "big")
        if size < _HEADER or start + size > end:
            raise ChunkFormatError(f"box at byte {start}: {size} bytes do not fit in {end - start}")
        yield data[start + 4 : start + _HEADER], start + _HEADER, start + size
        start += size


def _one(data: bytes, start: int, end: int, wanted: bytes) -> tuple[int, int]:
    for kind, inner, outer in _boxes(data, start, end):
        if kind == wanted:
            return inner, outer
    raise ChunkFormatError(f"no {wanted.decode()} box")

"""Read ISO BMFF boxes (ISO/IEC 14496-12), as far as splitting and describing a fragment needs it."""

from __future__ import annotations

from collections.abc import Iterator

_HEADER = 8
_STSD_FIELDS = 8
_VISUAL_SAMPLE_FIELDS = 78


def boxes(data: bytes, start: int = 0, end: int | None = None) -> Iterator[tuple[bytes, int, int]]:
    """The boxes of one level: (type, start with header, end). Raises `ValueError` if their sizes do not add
    up."""
    end = len(data) if end is None else end
    while start < end:
        size = int.from_bytes(data[start : start + 4], "big")
        if size < _HEADER or start + size > end:
            raise ValueError(f"box at byte {start}: {size} bytes do not fit in {end - start}")
        yield data[start + 4 : start + _HEADER], start, start + size
        start += size


def find(data: bytes, *path: bytes) -> bytes | None:
    """The content of the first box at `path`, without its header; None if there is none."""
    start, end = 0, len(data)
    for kind in path:
        for found, box_start, box_end in boxes(data, start, end):
            if found == kind:
                start, end = box_start + _inner(kind), box_end
                break
        else:
            return None
    return data[start:end]


def split(data: bytes) -> tuple[bytes, bytes]:
    """Split a one-fragment file into init segment (ftyp and moov) and fragment (moof and mdat)."""
    parts = {kind: data[start:end] for kind, start, end in boxes(data)}
    return parts[b"ftyp"] + parts[b"moov"], parts[b"moof"] + parts[b"mdat"]


def codec_string(init: bytes) -> str:
    """RFC 6381 name of the init segment's H.264 track: profile, constraints and level from its avcC. Raises
    `ValueError` if there is no avcC box."""
    config = find(init, b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd", b"avc1", b"avcC")
    if config is None:
        raise ValueError("init segment: no avcC box")
    return f"avc1.{config[1:4].hex()}"


def _inner(kind: bytes) -> int:
    if kind == b"stsd":
        return _HEADER + _STSD_FIELDS
    if kind == b"avc1":
        return _HEADER + _VISUAL_SAMPLE_FIELDS
    return _HEADER

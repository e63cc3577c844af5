"""Requests for a range of bytes. Source: RFC 9110, 13.1.5 and 14. No I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass

from turboserve.contracts.errors import TurboServeError

_RANGE = re.compile(r"bytes=[ \t]*(\d{0,19})-(\d{0,19})[ \t]*")


class RangeNotSatisfiableError(TurboServeError):
    """The requested range lies behind the end. `limit` is the size, bytes."""

    code, status, title = "range_not_satisfiable", 416, "Range not satisfiable"


@dataclass(frozen=True)
class ByteRange:
    """Bytes `start` to before `end`."""

    start: int
    end: int


def requested(header: str | None, size: int, if_range: str | None = None, etag: str = "") -> ByteRange | None:
    """Return the range that a request asks for. None: the whole, with status 200.

    A header with several ranges or another unit is ignored, which RFC 9110 allows. So is one whose `If-Range`
    names another version. Raises RangeNotSatisfiableError.
    """
    if header is None or (if_range is not None and if_range != etag):
        return None
    found = _RANGE.fullmatch(header)
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        length = int(found[2])
        if length == 0 or size == 0:
            raise _unsatisfiable(size)
        return ByteRange(max(0, size - length), size)
    start = int(found[1])
    if found[2] and int(found[2]) < start:
        return None
    if start >= size:
        raise _unsatisfiable(size)
    return ByteRange(start, min(int(found[2]) + 1, size) if found[2] else size)


def is_known(if_none_match: str | None, etag: str) -> bool:
    """Whether the client has this version already."""
    if if_none_match is None:
        return False
    known = [part.strip().removeprefix("W/") for part in if_none_match.split(",")]
    return etag in known or "*" in known


def _unsatisfiable(size: int) -> RangeNotSatisfiableError:
    return RangeNotSatisfiableError(f"Range: the video has {size} bytes", field="Range", limit=size)

"""Computes how much room the log has left, and how much to remove. Pure: sizes in, levels and sizes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turboserve.contracts.canaries import SpaceLevel

GAP = 0.1
"""Removal continues until the fill is this far below the share at which it began."""
_ORDER = tuple(SpaceLevel)


@dataclass(frozen=True)
class Shares:
    """Shares of a stream's `max_bytes` at which the levels begin."""

    low: float
    scarce: float
    full: float


@dataclass(frozen=True)
class Disk:
    """The disk of the broker's store, bytes."""

    free: int
    total: int


def worst(levels: Sequence[SpaceLevel]) -> SpaceLevel:
    return max(levels, key=_ORDER.index, default=SpaceLevel.ENOUGH)


def stream_level(used: int, max_bytes: int, shares: Shares) -> SpaceLevel:
    """Return the level of one stream. A stream without a limit has enough room."""
    if max_bytes <= 0:
        return SpaceLevel.ENOUGH
    return _level(used / max_bytes, shares)


def disk_level(disk: Disk | None, reserve: int) -> SpaceLevel:
    """Return the level of the disk: low below `reserve` free bytes, scarce below half, full below a quarter.

    The reserve is at most a tenth of the disk. None: the disk of another machine, which does not count.
    """
    if disk is None:
        return SpaceLevel.ENOUGH
    share = disk.free / max(1, min(reserve, disk.total // 10))
    if share >= 1:
        return SpaceLevel.ENOUGH
    if share >= 0.5:
        return SpaceLevel.LOW
    return SpaceLevel.SCARCE if share >= 0.25 else SpaceLevel.FULL


def excess(used: int, max_bytes: int, begins: float) -> int:
    """Return the bytes to remove from a stream so that it is `GAP` below the share `begins`; at least 0."""
    return max(0, used - int(max(0.0, begins - GAP) * max_bytes)) if max_bytes > 0 else 0


def shortened(counts: Mapping[str, int], floor: int) -> dict[str, int]:
    """Return the new lengths of the longest histories, by session: those over half the longest are halved.

    `counts` are the chunks of each session. No history becomes shorter than `floor`. Empty: all are at it.
    """
    longest = max(counts.values(), default=0)
    return {
        session: max(floor, count // 2)
        for session, count in counts.items()
        if count > floor and count > longest // 2
    }


def oldest_part(first: int, last: int, used: int, remove: int) -> int:
    """Return the first sequence to keep, if messages are about equal in size. `last` always stays."""
    if used <= 0 or remove <= 0 or last <= first:
        return first
    share = min(1.0, remove / used)
    return min(last, first + max(1, round(share * (last - first))))


def _level(fill: float, shares: Shares) -> SpaceLevel:
    if fill >= shares.full:
        return SpaceLevel.FULL
    if fill >= shares.scarce:
        return SpaceLevel.SCARCE
    return SpaceLevel.LOW if fill >= shares.low else SpaceLevel.ENOUGH

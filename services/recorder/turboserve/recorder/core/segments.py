"""Segments of a recording, and the index of what is stored.

A segment is one object: the fragments of successive chunks, byte for byte as the log had them. Its name says
which chunks it has, so the list of a recording's objects *is* the index. Storing the object is the only step
that changes the index, and object storage does it wholly or not at all.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

SEGMENTS = "segments/"
INITS = "inits/"
_NAME = re.compile(
    r"segments/(\d{10})-(\d{1,6})-(\d{1,10})-(\d{1,9})-(\d{1,7}(?:\.\d{1,6})?)-([0-9a-f]{16})-(\d{1,12})\.m4s"
)


def init_name(init: bytes) -> str:
    """Return the name of the object with this init segment."""
    return f"{INITS}{init_digest(init)}.mp4"


def init_digest(init: bytes) -> str:
    return hashlib.sha256(init).hexdigest()[:16]


@dataclass(frozen=True)
class Segment:
    """What one object has: chunks `first` to before `end`."""

    first: int
    """Index of the first chunk."""
    chunks: int
    first_frame: int
    """Index of the first frame in the session's timeline."""
    frames: int
    fps: float
    init: str
    """Digest of the init segment."""
    size: int
    """Bytes."""

    @property
    def end(self) -> int:
        return self.first + self.chunks

    @property
    def duration_s(self) -> float:
        return self.frames / self.fps

    @property
    def encoding(self) -> tuple[str, float]:
        """What all segments of one video have in common."""
        return self.init, self.fps

    @property
    def name(self) -> str:
        """Name of the object, below the recording's folder."""
        return (
            f"{SEGMENTS}{self.first:010}-{self.chunks}-{self.first_frame}-{self.frames}-{self.fps:.6f}"
            f"-{self.init}-{self.size}.m4s"
        )

    @classmethod
    def parse(cls, name: str) -> Segment | None:
        """Read the name of an object. None: it is no segment."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        first, chunks, first_frame, frames = (int(found[n]) for n in range(1, 5))
        fps = float(found[5])
        if chunks == 0 or frames == 0 or fps <= 0:
            return None
        return cls(first, chunks, first_frame, frames, fps, found[6], int(found[7]))


@dataclass(frozen=True)
class Part:
    """Segments of one encoding in a row: they play as one video."""

    segments: tuple[Segment, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each segment begins in the video, in frames. Missing chunks leave no gap."""
        found, at = [], 0
        for segment in self.segments:
            found.append(at)
            at += segment.frames
        return tuple(found)

    @property
    def duration_s(self) -> float:
        return sum(segment.duration_s for segment in self.segments)

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self.segments)


@dataclass(frozen=True)
class Index:
    """The segments that count, in the order of their chunks. No chunk is in two of them."""

    segments: tuple[Segment, ...] = ()

    @classmethod
    def of(cls, objects: Iterable[tuple[str, int]]) -> Index:
        """Build the index from the names and sizes of a recording's objects.

        Objects that were written in part do not count: their size is not the one in the name. Where segments
        of two recorders overlap, those count that together have the most chunks.
        """
        found = (parsed for name, size in objects if (parsed := Segment.parse(name)) and parsed.size == size)
        return cls(_most_chunks(sorted(found, key=lambda segment: (segment.end, segment.name))))

    def and_segment(self, segment: Segment) -> Index:
        """Return the index with a segment that was stored behind all others."""
        return Index((*self.segments, segment))

    @property
    def end(self) -> int | None:
        """Index of the chunk after the last stored one. None: nothing is stored."""
        return self.segments[-1].end if self.segments else None

    @property
    def chunks(self) -> int:
        return sum(segment.chunks for segment in self.segments)

    @property
    def bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def duration_s(self) -> float:
        return sum(segment.duration_s for segment in self.segments)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        found: list[list[Segment]] = []
        for segment in self.segments:
            if not found or found[-1][-1].encoding != segment.encoding:
                found.append([])
            found[-1].append(segment)
        return tuple(Part(tuple(segments)) for segments in found)


def _most_chunks(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Choose segments that do not overlap and have the most chunks. `segments` are sorted by their ends."""
    ends = [segment.end for segment in segments]
    best = [0]
    """Number of chunks that the first n segments can cover."""
    before = []
    for number, segment in enumerate(segments):
        place = bisect_right(ends, segment.first, 0, number)
        before.append(place)
        best.append(max(best[-1], best[place] + segment.chunks))
    chosen: list[Segment] = []
    number = len(segments)
    while number:
        # A segment is left out only if the ones before it cover as much.
        if best[number] == best[number - 1]:
            number -= 1
        else:
            chosen.append(segments[number - 1])
            number = before[number - 1]
    return tuple(reversed(chosen))

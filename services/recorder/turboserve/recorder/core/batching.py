"""Collects chunks to segments. No I/O, no clock: times are monotonic seconds."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.recorder.core.segments import Segment, init_digest


@dataclass(frozen=True)
class LogChunk:
    """One chunk as the log has it."""

    index: int
    first_frame: int
    frames: int
    fps: float
    init: bytes
    fragment: bytes

    @property
    def duration_s(self) -> float:
        return self.frames / self.fps


@dataclass(frozen=True)
class NewSegment:
    """A segment to store."""

    segment: Segment
    init: bytes
    data: bytes


@dataclass(frozen=True)
class SegmentLimits:
    """When a segment is whole."""

    seconds: float
    """Longest video of a segment, unless one chunk is longer."""
    bytes: int
    age_s: float
    """An unfinished segment is stored this long after its first chunk came."""


class Batch:
    """The chunks that are read and not stored yet: at most one segment.

    Every chunk index lands in exactly one segment: one below `next_chunk` is ignored, and one above it is
    only accepted after `skip_to`.
    """

    def __init__(self, next_chunk: int, limits: SegmentLimits) -> None:
        self._limits = limits
        self._next = next_chunk
        self._pending: list[LogChunk] = []
        self._since_s = 0.0

    @property
    def next_chunk(self) -> int:
        """Index of the chunk that comes next."""
        return self._next

    def add(self, chunk: LogChunk, now_s: float) -> list[NewSegment]:
        """Take the next chunk. Returns the segments that are whole now, which the caller stores.

        Raises ValueError for a chunk above `next_chunk`.
        """
        if chunk.index < self._next:
            return []
        if chunk.index > self._next:
            raise ValueError(f"chunk {chunk.index}: chunk {self._next} comes first")
        whole = self.take() if self._pending and not self._fits(chunk) else []
        if not self._pending:
            self._since_s = now_s
        self._pending.append(chunk)
        self._next = chunk.index + 1
        if self._duration_s() >= self._limits.seconds - 1e-6 or self._bytes() >= self._limits.bytes:
            whole += self.take()
        return whole

    def skip_to(self, index: int) -> list[NewSegment]:
        """Go on behind chunks that the log has lost. Returns the segment before the gap."""
        whole = self.take()
        self._next = max(self._next, index)
        return whole

    def is_due(self, now_s: float) -> bool:
        """Whether the pending chunks have waited long enough."""
        return bool(self._pending) and now_s - self._since_s >= self._limits.age_s

    def take(self) -> list[NewSegment]:
        """Return the pending chunks as a segment, if there are any."""
        if not self._pending:
            return []
        chunks, self._pending = self._pending, []
        first, data = chunks[0], b"".join(chunk.fragment for chunk in chunks)
        segment = Segment(
            first=first.index,
            chunks=len(chunks),
            first_frame=first.first_frame,
            frames=sum(chunk.frames for chunk in chunks),
            fps=first.fps,
            init=init_digest(first.init),
            size=len(data),
        )
        return [NewSegment(segment, first.init, data)]

    def _fits(self, chunk: LogChunk) -> bool:
        last = self._pending[-1]
        return (
            (chunk.init, chunk.fps) == (last.init, last.fps)
            and chunk.first_frame == last.first_frame + last.frames
            and self._duration_s() + chunk.duration_s <= self._limits.seconds + 1e-6
        )

    def _duration_s(self) -> float:
        return sum(chunk.duration_s for chunk in self._pending)

    def _bytes(self) -> int:
        return sum(len(chunk.fragment) for chunk in self._pending)

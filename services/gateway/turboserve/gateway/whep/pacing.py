"""When each frame of a viewer is sent: one by one, at the rate of the video.

Pure: methods take monotonic seconds. A viewer's *presentation time* is that of its frames on its own screen:
media time plus what it has waited, less what it has skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from turboserve.gateway.whep.access_units import AccessUnit

LATE_S = 0.02
"""A frame that comes later than this after its time moves all frames after it."""


@dataclass(frozen=True)
class QueuedChunk:
    """A chunk that is queued. `index`: the chunk's."""

    index: int
    units: tuple[AccessUnit, ...]

    @property
    def end_s(self) -> float:
        """Media time of its end, seconds."""
        return self.units[-1].start_s + self.units[-1].duration_s


@dataclass(frozen=True)
class PacedFrame:
    """A frame whose time has come."""

    unit: AccessUnit
    presentation_s: float
    """Presentation time since the first frame, seconds. It only increases."""
    chunk: QueuedChunk
    first: bool
    """Whether it is the first frame of its chunk."""


class Pacer:
    """The frames of one viewer that wait for their time.

    A chunk that finds no frame waiting is shown `buffer_s` after it came, so that chunks that come a little
    later still come in time. If a chunk is late, the last frame stands and presentation time goes on.
    """

    def __init__(self, buffer_s: float) -> None:
        self._buffer_s = buffer_s
        self._chunks: deque[QueuedChunk] = deque()
        self._next = 0
        """Position in the oldest chunk of its frame that is next."""
        self._offset_s: float | None = None
        """Monotonic time less media time. None: no frame was sent."""
        self._origin_s = 0.0
        """Monotonic time of the first frame."""
        self._presented_s = -1.0
        self._playhead_s = 0.0
        """Media time of the end of the newest frame that was sent."""

    @property
    def queued_s(self) -> float:
        """Media that waits, seconds."""
        return self.end_s - self._chunks[0].units[self._next].start_s if self._chunks else 0.0

    @property
    def end_s(self) -> float:
        """Media time up to which the viewer has video, sent or waiting, seconds."""
        return self._chunks[-1].end_s if self._chunks else self._playhead_s

    def playhead_s(self, now: float) -> float:
        """Return the media time that is on the viewer's screen if nothing delays what was sent."""
        if self._offset_s is None:
            return self._playhead_s
        return min(now - self._offset_s, self._playhead_s)

    def add(self, index: int, units: Iterable[AccessUnit], now: float, *, skip: bool = False) -> None:
        """Queue a chunk. `skip`: show it at once, and discard the frames that wait."""
        chunk = QueuedChunk(index, tuple(units))
        if not chunk.units:
            return
        if skip:
            self._chunks.clear()
            self._next = 0
        waited = not self._chunks
        self._chunks.append(chunk)
        start_s = chunk.units[0].start_s
        if self._offset_s is None:
            self._offset_s = self._origin_s = now + self._buffer_s
            self._offset_s -= start_s
            self._playhead_s = start_s
        elif skip:
            self._offset_s = now - start_s
        elif waited and start_s + self._offset_s < now - LATE_S:
            self._offset_s = now + self._buffer_s - start_s

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until the next frame's time, 0 if it has come; None: no frame waits."""
        if not self._chunks or self._offset_s is None:
            return None
        due_s = self._chunks[0].units[self._next].start_s + self._offset_s
        return max(0.0, due_s - now)

    def take(self) -> PacedFrame:
        """Return the next frame. Call this only if one waits."""
        assert self._offset_s is not None
        chunk, first = self._chunks[0], self._next == 0
        unit = chunk.units[self._next]
        self._next += 1
        if self._next == len(chunk.units):
            self._chunks.popleft()
            self._next = 0
        presentation_s = unit.start_s + self._offset_s - self._origin_s
        # After a skip, the first frame may be due before the time of the one that was sent last.
        self._presented_s = max(presentation_s, self._presented_s + unit.duration_s / 4)
        self._playhead_s = unit.start_s + unit.duration_s
        return PacedFrame(unit, self._presented_s, chunk, first)

"""When each frame of a viewer is sent: at the rate of the video, and those of a short window together.

Pure: methods take monotonic seconds. A viewer's *presentation time* is that of its frames on its own screen:
media time plus what it has waited, less what it has skipped.

Frames are due on the grid of the video's frame duration. Time is divided into windows, the same for all
viewers, and at the beginning of each the frames that are due in it are sent. The viewer's player shows each
at its RTP time. So the process wakes up once per window for the frames of all viewers: to wake up costs more
than to send.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from turboserve.gateway.whep.access_units import AccessUnit
from turboserve.static_frozen import statically_frozen

LATE_S = 0.02
"""Delay of a frame above which all later frames are delayed by as much."""
_ROUNDING = 1e-4
"""Part of a window by which a time may miss the beginning of the window that it is in."""


@dataclass(frozen=True)
class QueuedChunk:
    """A chunk that is queued. `index`: the chunk's."""

    index: int
    units: tuple[AccessUnit, ...]

    @property
    def end_s(self) -> float:
        """Media time of its end, seconds."""
        return self.units[-1].start_s + self.units[-1].duration_s


@statically_frozen(eq=False)
class PacedFrame:
    """A frame that is sent now."""

    unit: AccessUnit
    presentation_s: float
    """Presentation time since the first frame, seconds. It only increases."""
    chunk: QueuedChunk
    first: bool
    """Whether it is the first frame of its chunk."""
    due_s: float
    """When it should be on the viewer's screen, monotonic seconds."""


class Pacer:
    """The frames of one viewer that wait for their time.

    A chunk that finds no frame waiting is shown `buffer_s` after it came, at the nearest time of the grid. So
    chunks that come a little later still come in time. If a chunk is late, the last frame stands and
    presentation time goes on.
    """

    def __init__(self, buffer_s: float, window_s: float = 0.0) -> None:
        """`window_s`: see the module; 0: each frame is sent when it is due."""
        self._buffer_s = buffer_s
        self.window_s = window_s
        """May change at any time: the window of a frame is found when the frame is next."""
        self._chunks: deque[QueuedChunk] = deque()
        self._next = 0
        """Position in the oldest chunk of its frame that is next."""
        self._offset_s: float | None = None
        """Monotonic time less media time. None: no frame was sent."""
        self._at_once_s: float | None = None
        """When the next frame is due although the grid has another time for it, monotonic seconds."""
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
        first = chunk.units[0]
        if self._offset_s is None:
            self._origin_s = _on_grid(now + self._buffer_s, first.duration_s)
            self._offset_s = self._origin_s - first.start_s
            self._playhead_s = first.start_s
        elif skip:
            self._offset_s = _on_grid(now, first.duration_s) - first.start_s
            self._at_once_s = now
        elif waited and first.start_s + self._offset_s < now - LATE_S:
            self._offset_s = _on_grid(now + self._buffer_s, first.duration_s) - first.start_s

    @property
    def send_at_s(self) -> float | None:
        """When the next frame is sent, monotonic seconds: it may be in the past. None: no frame waits."""
        if not self._chunks or self._offset_s is None:
            return None
        if self._at_once_s is not None:
            return self._at_once_s
        return self._window(self._chunks[0].units[self._next].start_s + self._offset_s)

    def take(self, now: float) -> list[PacedFrame]:
        """Return the frames that are sent now, which no later call returns."""
        frames: list[PacedFrame] = []
        while (at_s := self.send_at_s) is not None and at_s <= now:
            frames.append(self._take())
        return frames

    def _window(self, due_s: float) -> float:
        """Return the beginning of the window in which a time is."""
        window_s = self.window_s
        return math.floor(due_s / window_s + _ROUNDING) * window_s if window_s else due_s

    def _take(self) -> PacedFrame:
        assert self._offset_s is not None
        chunk, first = self._chunks[0], self._next == 0
        unit = chunk.units[self._next]
        self._next += 1
        if self._next == len(chunk.units):
            self._chunks.popleft()
            self._next = 0
        due_s = unit.start_s + self._offset_s if self._at_once_s is None else self._at_once_s
        self._at_once_s = None
        presentation_s = due_s - self._origin_s
        # After a skip, the first frame may be due before the time of the one that was sent last.
        self._presented_s = max(presentation_s, self._presented_s + unit.duration_s / 4)
        self._playhead_s = unit.start_s + unit.duration_s
        return PacedFrame(unit, self._presented_s, chunk, first, due_s)


def _on_grid(at_s: float, step_s: float) -> float:
    """Return the multiple of `step_s` that is nearest to `at_s`."""
    return round(at_s / step_s) * step_s if step_s > 0 else at_s

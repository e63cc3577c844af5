"""A virtual player: what a viewer with a screen would have seen, from when each chunk arrived.

A core: it receives the time as an argument and decodes nothing. Times are monotonic seconds; positions are
seconds of media.
"""

from __future__ import annotations

from dataclasses import dataclass, field

START_BUFFER_S = 1.0
"""Video in the buffer at which playback starts, as in the player page."""
RESUME_BUFFER_S = 0.25
"""Video in the buffer at which playback continues after a stall."""


@dataclass
class Player:
    """Plays one session from its first chunk on. Call `tick` before reading time-dependent fields."""

    start_buffer_s: float = START_BUFFER_S
    resume_buffer_s: float = RESUME_BUFFER_S
    position_s: float = 0.0
    """The playhead."""
    end_s: float = 0.0
    """End of the video that has arrived without a gap."""
    next_chunk: int = 0
    """Index of the chunk that must arrive next."""
    chunks: int = 0
    lost: int = 0
    """Chunks skipped because a later chunk arrived first."""
    repeated: int = 0
    """Chunks that arrived more than once."""
    stalls: int = 0
    """How often playback stopped because the next chunk was missing."""
    stall_s: float = 0.0
    """Total duration of stalls, in seconds. A current stall counts up to the last `tick`."""
    started: bool = False
    arrivals_s: list[float] = field(default_factory=list)
    """Times at which new chunks arrived."""
    _stalled: bool = False
    _paused: bool = False
    _now_s: float | None = None

    @property
    def buffered_s(self) -> float:
        return max(self.end_s - self.position_s, 0.0)

    @property
    def stalled(self) -> bool:
        return self._stalled

    def arrived(self, index: int, start_s: float, end_s: float, now_s: float) -> bool:
        """Record the arrival of chunk `index`.

        Returns whether it is new; the first chunk may have any index.
        """
        self.tick(now_s)
        if self.chunks == 0:
            self.next_chunk = index
            self.position_s = start_s
        if index < self.next_chunk:
            self.repeated += 1
            return False
        self.lost += index - self.next_chunk
        self.next_chunk = index + 1
        self.chunks += 1
        self.end_s = max(self.end_s, end_s)
        self.arrivals_s.append(now_s)
        if not self.started and self.buffered_s >= self.start_buffer_s:
            self.started = True
        if self._stalled and self.buffered_s >= self.resume_buffer_s:
            self._stalled = False
        return True

    def pause(self, paused: bool, now_s: float) -> None:
        """Set the viewer's own pause: the playhead does not move and nothing counts as a stall."""
        self.tick(now_s)
        self._paused = paused
        if paused:
            self._stalled = False

    def skip(self, start_s: float, now_s: float) -> None:
        """Discard the video before media time `start_s`, which has arrived."""
        self.tick(now_s)
        self.position_s = max(self.position_s, start_s)

    def tick(self, now_s: float) -> None:
        """Advance the playhead to `now_s`, at most to the end of the buffer, and account for stalls."""
        elapsed_s = 0.0 if self._now_s is None else max(now_s - self._now_s, 0.0)
        self._now_s = now_s
        if not self.started or self._paused:
            return
        if self._stalled:
            self.stall_s += elapsed_s
            return
        played_s = min(elapsed_s, self.buffered_s)
        self.position_s += played_s
        if played_s < elapsed_s:
            self.stalls += 1
            self.stall_s += elapsed_s - played_s
            self._stalled = True

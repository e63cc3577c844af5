"""When a WebRTC viewer is told of a chunk: at once if it says something new, else with the next ones.

Pure: methods take monotonic seconds. Each message costs a datagram and its acknowledgment. Encryption takes
a fraction of the time directly after another message's, so all viewers are told at the same times.
"""

from __future__ import annotations

from turboserve.contracts.chunks import ChunkHeader

TOGETHER_S = 2.0
"""Announcements that only continue the one before them are sent at the multiples of this time, seconds: three
chunks of 0.75 s fit into one packet."""
_ROUNDING_S = 0.001


class Announcements:
    """The announcements of one viewer that wait."""

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self._since_s = 0.0
        """When the oldest was added."""
        self._said: tuple[int, int] | None = None
        """Newest control and epoch of which the viewer was told."""
        self._next_s = 0.0
        """Presentation time at which the next chunk begins if it is not late and nothing is skipped."""

    def add(self, text: str, header: ChunkHeader, presentation_s: float, now: float) -> bool:
        """Keep the announcement of a chunk that begins. Returns whether all that wait are due: it is new.

        `presentation_s`: that of its first frame.
        """
        if not self._waiting:
            self._since_s = now
        self._waiting.append(text)
        says = header.control_seq, header.epoch
        continues = says == self._said and abs(presentation_s - self._next_s) < _ROUNDING_S
        self._said, self._next_s = says, presentation_s + header.end_s - header.start_s
        return not continues

    def are_due(self, now: float) -> bool:
        """Whether some wait, and a multiple of `TOGETHER_S` has passed since."""
        return bool(self._waiting) and now // TOGETHER_S > self._since_s // TOGETHER_S

    def take(self) -> list[str]:
        """Return all that wait, which no later call returns."""
        taken, self._waiting = self._waiting, []
        return taken

"""A viewer's player: a start buffer, stalls that shift what follows, pauses, a dropped buffer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

SAME_S = 1e-9
"""Difference below which two times are equal: sums of chunk lengths are rounded."""


@dataclass(frozen=True)
class ViewerPause:
    """A pause of the viewer, which stops the playhead and not the generation."""

    at_s: float
    """Media time at which the playhead stops."""
    lasts_s: float


class Player:
    """Plays chunks in order. A chunk is in time if it is there when the playhead reaches it.

    Source: SlackServe, 5.1 (deadlines of chunks). The paper leaves open when playing starts and whether a
    stall shifts what follows. Here it starts at a given time, and a stall shifts.
    """

    def __init__(self, starts_s: float, pauses: Iterable[ViewerPause] = ()) -> None:
        """`starts_s`: time at which the first chunk is due."""
        self.playhead_s = 0.0
        """Media time that is shown."""
        self.stalls: list[float] = []
        """Length of each stall, seconds. A late first chunk is one."""
        self.dropping = False
        """Whether the player discards what it receives, up to the chunk that it skips to."""
        self._at = starts_s
        """Time up to which the player has played; later than now while it holds."""
        self._end_s = 0.0
        self._pauses = deque(sorted(pauses, key=lambda pause: pause.at_s))

    def advance(self, now: float) -> float:
        """Play up to `now`. Returns the playhead, seconds of media."""
        while self._at < now:
            pause = self._pauses[0] if self._pauses else None
            if pause is not None and self.playhead_s >= pause.at_s - SAME_S:
                self._pauses.popleft()
                self._at += pause.lasts_s
                continue
            until = self._end_s if pause is None else min(self._end_s, pause.at_s)
            left_s = until - self.playhead_s
            if left_s <= SAME_S:
                break
            # Exact sums keep the end of a chunk equal to the start of the next one.
            if left_s <= now - self._at:
                self._at += left_s
                self.playhead_s = until
            else:
                self.playhead_s += now - self._at
                self._at = now
        return self.playhead_s

    def receive(self, now: float, end_s: float, skips: bool = False) -> bool:
        """Accept the next chunk, which ends at media time `end_s`. Returns whether it is in time.

        `skips`: it is the chunk that the player skips to after `drop_buffer`.
        """
        self.advance(now)
        if self.dropping and not skips:
            # It is there before it could be needed, and is never shown.
            self.playhead_s = self._end_s = end_s
            return True
        self.dropping = False
        self._at = now if math.isinf(self._at) else self._at
        late_s = now - self._at
        starved = self._end_s - self.playhead_s <= SAME_S
        self._end_s = end_s
        if not starved or late_s <= SAME_S:
            return True
        self.stalls.append(late_s)
        self._at = now
        return False

    def drop_buffer(self, now: float, resumes_s: float) -> None:
        """Discard what is not shown, and all chunks up to the one to skip to, which is due at `resumes_s`.

        `resumes_s`: infinite: it is due whenever it comes. Pauses within the discarded part are discarded,
        too.
        """
        self.advance(now)
        self.dropping = True
        self.playhead_s = self._end_s
        while self._pauses and self._pauses[0].at_s < self._end_s - SAME_S:
            self._pauses.popleft()
        self._at = max(now, resumes_s)

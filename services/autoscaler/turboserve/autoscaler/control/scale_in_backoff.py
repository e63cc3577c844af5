"""How long a scale-in waits: longer where giving back was a mistake."""

from __future__ import annotations

FARTHEST = 8
"""Times the window, at most."""


class ScaleInBackoff:
    """A factor on the scale-in window: doubled by every mistake, halved by every scale-in that was none.

    A scale-in is a mistake if the pool grows again within `pays_s`, what a worker takes to start: starting it
    again then costs more than was saved. Waves that are faster than that are held through, not followed.
    """

    def __init__(self, pays_s: float) -> None:
        self.factor = 1
        self._pays_s = pays_s
        self._shrank_at: float | None = None

    def shrank(self, now: float) -> None:
        """The pool was made smaller."""
        if self._shrank_at is not None and now - self._shrank_at >= self._pays_s:
            self.factor = max(self.factor // 2, 1)
        self._shrank_at = now

    def grew(self, now: float) -> None:
        """The pool was made larger."""
        if self._shrank_at is not None and now - self._shrank_at < self._pays_s:
            self.factor = min(self.factor * 2, FARTHEST)
            self._shrank_at = None

"""The largest value in a sliding window of time."""

from __future__ import annotations

from collections import deque


class Peak:
    """Values added at rising times. Each holds until the next one, and counts for `window_s` after that."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._falling: deque[tuple[float, int]] = deque()
        """(last time at which the value held, value): values fall strictly, times rise."""

    def add(self, value: int, now: float) -> None:
        if self._falling:
            # The last value held until `now`.
            self._falling[-1] = (now, self._falling[-1][1])
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((now, value))
        while self._falling[0][0] < now - self._window_s:
            self._falling.popleft()

    def over(self, window_s: float, now: float) -> int:
        """Return the largest value of the last `window_s`, up to the whole window; 0 if there is none."""
        return next((value for at, value in self._falling if at >= now - window_s), 0)

    @property
    def value(self) -> int:
        """The largest value of the window; 0 if there is none."""
        return self._falling[0][1] if self._falling else 0

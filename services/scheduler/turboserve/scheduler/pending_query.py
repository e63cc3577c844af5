"""Tracks listings of the store: whether one is wanted, due or under way."""

from __future__ import annotations


class PendingQuery:
    """One kind of listing. At most one is under way, and two are at least `least_s` apart."""

    def __init__(self, least_s: float) -> None:
        self.wanted = False
        self._least_s = least_s
        self._ticket: int | None = None
        self._asked_at: float | None = None
        self._asked_listening = 0.0

    def due(self, now: float) -> bool:
        rested = self._asked_at is None or now - self._asked_at >= self._least_s
        return self.wanted and self._ticket is None and rested

    def older_than(self, seconds: float, now: float) -> bool:
        """Whether the last listing was requested at least `seconds` ago; False if there was none."""
        return self._asked_at is not None and now - self._asked_at >= seconds

    def ask(self, ticket: int, now: float, listened: float) -> None:
        self.wanted = False
        self._ticket, self._asked_at, self._asked_listening = ticket, now, listened

    def answered(self, ticket: int) -> float | None:
        """End the listing; returns the listening time of its request, or None if `ticket` is another one."""
        if ticket != self._ticket:
            return None
        self._ticket = None
        return self._asked_listening

"""Detect that a looping thread does not advance."""

from __future__ import annotations


class Watchdog:
    """Counts observations, not time: what stops or starves the whole process also stops observations."""

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self._turns: int | None = None
        self._still = 0

    def stuck(self, turns: int) -> bool:
        """Whether `turns`, which increases with every round, was the same in `looks` observations in a
        row."""
        self._still = self._still + 1 if turns == self._turns else 0
        self._turns = turns
        return self._still >= self._looks

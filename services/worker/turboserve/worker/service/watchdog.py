"""Whether a thread that should go round and round still does."""

from __future__ import annotations


class Watchdog:
    """Counts looks and not time: what stops the whole process, or starves it, stops the looks as well."""

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self._turns: int | None = None
        self._still = 0

    def stuck(self, turns: int) -> bool:
        """Whether `turns`, a number that rises with every round, was the same in so many looks in a row."""
        self._still = self._still + 1 if turns == self._turns else 0
        self._turns = turns
        return self._still >= self._looks

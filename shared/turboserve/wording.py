"""Counts in texts for people."""

from __future__ import annotations


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun, as in `1 session waits` and `2 sessions wait`.

    Args:
        number: The count.
        one: The words after 1.
        many: The words after all other numbers. None: `one` with an s.
    """
    if number == 1:
        return f"1 {one}"
    return f"{number} {many or f'{one}s'}"

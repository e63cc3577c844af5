"""Pages of numbered rows. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def first_page(rows: Sequence[T], limit: int, number: Callable[[T], int]) -> tuple[Sequence[T], int | None]:
    """Return at most `limit` of the rows, and the number of the last of them if there are more."""
    shown = rows[:limit]
    return shown, number(shown[-1]) if len(rows) > len(shown) else None

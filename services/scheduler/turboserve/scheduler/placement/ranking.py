"""A sorted list of names, of which some change their places."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

Item = tuple[float | str, ...]
"""Sort key of a name; the name is the last element."""


class Ranking:
    """A sorted list with one item per name. A change takes two binary searches and a shift of pointers.

    `SortedList` of sortedcontainers is slower up to 4,096 workers: its nested lists cost more than the shift.
    """

    __slots__ = ("_of", "items")

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._of: dict[str, Item] = {}

    def put(self, name: str, item: Item | None) -> None:
        """Rank `name` by `item`, which ends with the name. None removes the name."""
        before = self._of.get(name)
        if before == item:
            return
        if before is not None:
            del self.items[bisect.bisect_left(self.items, before)]
            del self._of[name]
        if item is not None:
            bisect.insort(self.items, item)
            self._of[name] = item

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, the cheapest first."""
        return (str(item[-1]) for item in self.items)

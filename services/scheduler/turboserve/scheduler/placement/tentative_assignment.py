"""A decision in the making: sessions put on workers one by one, before any of it is done."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from math import inf

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.pool import PoolEntry
from turboserve.scheduler.placement.ranking import Item, Ranking


class _Cursor:
    """How far one ranking has been read, and what was met on the way and ranks elsewhere by now."""

    __slots__ = ("heap", "position")

    def __init__(self) -> None:
        self.position = 0
        self.heap: list[Item] = []


class TentativeAssignment:
    """Counts sessions added to workers, and finds the next best target.

    Reads rankings from their cheap end only as far as needed: n additions take O(n log n), however many
    workers there are. The cluster must not change meanwhile.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._entries = cluster.entries
        self._cursors: dict[int, _Cursor] = {}
        self.added: dict[str, int] = {}
        """Worker → sessions added to it."""

    def add(self, worker: str) -> None:
        self.added[worker] = self.added.get(worker, 0) + 1

    def level_s(self, entry: PoolEntry) -> float:
        """Its chunk latency with what was added, once all that is under way is done."""
        return entry.curve(entry.staying + self.added.get(entry.id, 0))

    def best(
        self, ranking: Ranking, limit_s: float = inf, excluded: Collection[str] = (), suspects: bool = False
    ) -> PoolEntry | None:
        """The first of `ranking` that has room, as things stand now, and whose chunk latency with one more
        session is at most `limit_s`. `suspects`: they may be it, last of all (and `limit_s` is inf)."""
        cursor = self._cursors.setdefault(id(ranking), _Cursor())
        aside: list[Item] = []
        found: PoolEntry | None = None
        while (item := self._first(cursor, ranking)) is not None:
            suspect, latency_s, name = bool(item[0]), float(item[1]), str(item[-1])
            if latency_s > limit_s or (suspect and not suspects):
                break
            if name not in excluded:
                found = self._entries[name]
                break
            aside.append(heapq.heappop(cursor.heap))
        for item in aside:
            heapq.heappush(cursor.heap, item)
        return found

    def _first(self, cursor: _Cursor, ranking: Ranking) -> Item | None:
        """The smallest item that is true now; it is at the head of the heap then."""
        heap, items = cursor.heap, ranking.items
        while True:
            while heap and (count := self.added.get(str(heap[0][-1]))) is not None:
                true = self._entries[str(heap[0][-1])].target_item(count)
                if true == heap[0]:
                    break
                # Its latency has only grown: what is true now ranks further back.
                heapq.heappop(heap)
                if true is not None:
                    heapq.heappush(heap, true)
            if cursor.position < len(items) and (not heap or items[cursor.position] < heap[0]):
                heapq.heappush(heap, items[cursor.position])
                cursor.position += 1
                continue
            return heap[0] if heap else None

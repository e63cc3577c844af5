"""Sessions added to workers of a cluster as a trial, to find the next best target."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from math import inf

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.pool import PoolEntry
from turboserve.scheduler.placement.ranking import Item, Ranking


class _Cursor:
    """Read position in one ranking. The heap holds the items read so far, with updated keys."""

    __slots__ = ("heap", "position")

    def __init__(self) -> None:
        self.position = 0
        self.heap: list[Item] = []


class TentativeAssignment:
    """Counts sessions added to workers, and finds the next best target.

    Rankings are read from their best item on and only as far as needed, so n additions take O(n log n) for
    any number of workers. The cluster must not change meanwhile.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._entries = cluster.entries
        self._cursors: dict[int, _Cursor] = {}
        self.added: dict[str, int] = {}
        """Worker → sessions added to it."""

    def add(self, worker: str) -> None:
        self.added[worker] = self.added.get(worker, 0) + 1

    def level_s(self, entry: PoolEntry) -> float:
        """Return a worker's chunk latency in seconds, with the added sessions and all migrations done."""
        return entry.curve(entry.staying + self.added.get(entry.id, 0))

    def best(
        self,
        ranking: Ranking,
        limit_s: float = inf,
        excluded: Collection[str] = (),
        last_resort: bool = False,
    ) -> PoolEntry | None:
        """Return the best worker of `ranking`, with the added sessions counted; None if there is none.

        The worker has room, is not in `excluded`, and its chunk latency with one more session is at most
        `limit_s`. `last_resort`: workers that hold more than K sessions at lower fidelity may be chosen, and
        after them suspect workers; `limit_s` must then be inf.
        """
        cursor = self._cursors.setdefault(id(ranking), _Cursor())
        aside: list[Item] = []
        found: PoolEntry | None = None
        while (item := self._first(cursor, ranking)) is not None:
            last, latency_s, name = bool(item[0]), float(item[1]), str(item[-1])
            if latency_s > limit_s or (last and not last_resort):
                break
            if name not in excluded:
                found = self._entries[name]
                break
            aside.append(heapq.heappop(cursor.heap))
        for item in aside:
            heapq.heappush(cursor.heap, item)
        return found

    def _first(self, cursor: _Cursor, ranking: Ranking) -> Item | None:
        """Return the smallest item after updates; it is then the head of the heap. None if none is left."""
        heap, items = cursor.heap, ranking.items
        while True:
            while heap and (count := self.added.get(str(heap[0][-1]))) is not None:
                true = self._entries[str(heap[0][-1])].target_item(count)
                if true == heap[0]:
                    break
                # Added sessions only raise the key, so the updated item ranks further back.
                heapq.heappop(heap)
                if true is not None:
                    heapq.heappush(heap, true)
            if cursor.position < len(items) and (not heap or items[cursor.position] < heap[0]):
                heapq.heappush(heap, items[cursor.position])
                cursor.position += 1
                continue
            return heap[0] if heap else None

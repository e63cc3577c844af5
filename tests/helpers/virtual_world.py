"""What fault simulations share: a virtual clock, chance from one seed, and servers that go and come back.

A failing seed is replayed by its number: nothing else decides what happens, or when.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable


class VirtualWorld:
    """Actions at virtual times; `now` is the time, seconds."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.trace: list[str] = []
        """What the core decided, and when: the same for the same seed."""
        self.store_up = True
        self.generation = 0
        """Number of the core's life: what was meant for an earlier one is not heard."""
        self.names = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), action))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = end

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def delay_around(self, mean_s: float) -> float:
        """How long a message takes: mostly short, now and then long, so that later ones overtake it."""
        return self.random.expovariate(1 / mean_s)

    def lose_store(self, least_s: float, most_s: float) -> None:
        self.store_up = False
        self.at(self.random.uniform(least_s, most_s), self._store_returns)

    def _store_returns(self) -> None:
        self.store_up = True

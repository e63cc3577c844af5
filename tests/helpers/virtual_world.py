"""Shared parts of fault simulations: a virtual clock, one seed's random choices, and a store that fails.

The number of a failing seed replays it: nothing else determines what happens, or when.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable


class VirtualWorld:
    """Actions at virtual times; `now` is the time in seconds."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.trace: list[str] = []
        """Decisions of the core with their times: the same for the same seed."""
        self.store_up = True
        self.generation = 0
        """Number of the core's incarnation. Messages to an earlier one are dropped."""
        self.names = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def at(self, delay_s: float, action: Callable[[], object]) -> None:
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
        """Draw the delay of a message: mostly short, sometimes long, so that later messages overtake it."""
        return self.random.expovariate(1 / mean_s)

    def lose_store(self, least_s: float, most_s: float) -> None:
        self.store_up = False
        self.at(self.random.uniform(least_s, most_s), self._store_returns)

    def _store_returns(self) -> None:
        self.store_up = True

"""What the autoscalers say of their pools, as last heard."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve import subjects
from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.errors import NotFoundError, UnavailableError
from turboserve.contracts.pool import PoolStatus

SILENT_S = 5.0
"""An autoscaler speaks every second: after so long without a word something is wrong with it."""
FORGOTTEN_S = 600.0
RETRY_S = 2.0


@dataclass(frozen=True)
class Word:
    """A pool's last word, and how old it is, seconds."""

    status: PoolStatus
    age_s: float


class Pools:
    """Kept in memory only: a gateway that has just started hears of every pool within a second."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus, self._clock = bus, clock
        self._words: dict[str, tuple[PoolStatus, float]] = {}

    async def start(self) -> None:
        await self._bus.subscribe(subjects.POOL, "*", self._hear)

    async def _hear(self, status: PoolStatus, _body: bytes) -> None:
        now = self._clock.monotonic()
        self._words[status.pool] = (status, now)
        for pool in [p for p, (_, at) in self._words.items() if now - at > FORGOTTEN_S]:
            del self._words[pool]

    def word(self, pool: str | None = None) -> Word:
        """Of the pool of this name, or of the one heard last; UnavailableError if none speaks, NotFoundError
        for a name that none of them has."""
        if not self._words:
            raise UnavailableError("no autoscaler has been heard yet", field="pool", retry_after_s=RETRY_S)
        if pool is not None and pool not in self._words:
            names = ", ".join(sorted(self._words))
            raise NotFoundError(f"there is no pool {pool}", field="pool", limit=names)
        status, at = self._words[pool] if pool else max(self._words.values(), key=lambda word: word[1])
        return Word(status, self._clock.monotonic() - at)

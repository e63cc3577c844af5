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
class PoolSnapshot:
    """A pool's last word, and how old it is, seconds."""

    status: PoolStatus
    age_s: float


class PoolSnapshots:
    """Kept in memory only: a gateway that has just started hears of every pool within a second."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus, self._clock = bus, clock
        self._snapshots: dict[str, tuple[PoolStatus, float]] = {}

    async def start(self) -> None:
        await self._bus.subscribe(subjects.POOL, "*", self._on_status)

    async def _on_status(self, status: PoolStatus, _body: bytes) -> None:
        now = self._clock.monotonic()
        self._snapshots[status.pool] = (status, now)
        for pool in [p for p, (_, at) in self._snapshots.items() if now - at > FORGOTTEN_S]:
            del self._snapshots[pool]

    def snapshot(self, pool: str | None = None) -> PoolSnapshot:
        """Of the pool of this name, or of the one heard last; UnavailableError if none speaks, NotFoundError
        for a name that none of them has."""
        if not self._snapshots:
            raise UnavailableError("no autoscaler has reported yet", field="pool", retry_after_s=RETRY_S)
        if pool is not None and pool not in self._snapshots:
            names = ", ".join(sorted(self._snapshots))
            raise NotFoundError(f"there is no pool {pool}", field="pool", limit=names)
        status, at = (
            self._snapshots[pool] if pool else max(self._snapshots.values(), key=lambda snapshot: snapshot[1])
        )
        return PoolSnapshot(status, self._clock.monotonic() - at)

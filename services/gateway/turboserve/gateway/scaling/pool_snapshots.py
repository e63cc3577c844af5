"""Keeps the last report of every autoscaler about its pool."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve import subjects
from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.errors import NotFoundError, UnavailableError
from turboserve.contracts.pool import PoolStatus

SILENT_S = 5.0
"""An autoscaler reports every second. After this many seconds without a report it counts as failed."""
FORGOTTEN_S = 600.0
RETRY_S = 2.0


@dataclass(frozen=True)
class PoolSnapshot:
    """A pool's last report, and its age in seconds."""

    status: PoolStatus
    age_s: float


class PoolSnapshots:
    """The last report of every pool, in memory only: a new gateway receives all of them within a second."""

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
        """Return the snapshot of `pool`; None means the pool that reported last.

        Raises UnavailableError if no pool has reported, NotFoundError for an unknown name.
        """
        if not self._snapshots:
            raise UnavailableError("no autoscaler has reported yet", field="pool", retry_after_s=RETRY_S)
        if pool is not None and pool not in self._snapshots:
            names = ", ".join(sorted(self._snapshots))
            raise NotFoundError(f"there is no pool {pool}", field="pool", limit=names)
        status, at = (
            self._snapshots[pool] if pool else max(self._snapshots.values(), key=lambda snapshot: snapshot[1])
        )
        return PoolSnapshot(status, self._clock.monotonic() - at)

"""Keeps the last report of every autoscaler about its pool."""

from __future__ import annotations

import math
from dataclasses import dataclass

from turboserve import subjects
from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.errors import UnavailableError
from turboserve.contracts.pool import OrderPool, PoolOrders, PoolStatus
from turboserve.gateway.pools.errors import PoolNotFoundError

SILENT_S = 5.0
"""An autoscaler reports every second. After this many seconds without a report it counts as failed."""
FORGOTTEN_S = 600.0
RETRY_S = 2.0
ID_SHOWN = 80


@dataclass(frozen=True)
class PoolSnapshot:
    """A pool's last report, and its age in seconds."""

    status: PoolStatus
    age_s: float


class PoolSnapshots:
    """The last report of every pool, in memory only: a new gateway receives all of them within a second."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus, self._clock = bus, clock
        self._received: dict[str, tuple[PoolStatus, float]] = {}
        self._started_at = -math.inf

    async def start(self) -> None:
        self._started_at = self._clock.monotonic()
        await self._bus.subscribe(subjects.POOL, "*", self._on_status)

    async def _on_status(self, status: PoolStatus, _body: bytes) -> None:
        self._received[status.pool] = (status, self._clock.monotonic())

    def all(self) -> list[PoolSnapshot]:
        """Return the snapshots of all pools that have reported in the last `FORGOTTEN_S`, sorted by id."""
        now = self._clock.monotonic()
        self._received = {
            pool: (status, at) for pool, (status, at) in self._received.items() if now - at <= FORGOTTEN_S
        }
        return [PoolSnapshot(status, now - at) for _, (status, at) in sorted(self._received.items())]

    def snapshot(self, pool: str) -> PoolSnapshot:
        """Return the snapshot of `pool`.

        Raises PoolNotFoundError, which names the known pools, and UnavailableError for an unknown pool while
        this gateway is so young that a report may still be on its way.
        """
        known = {snapshot.status.pool: snapshot for snapshot in self.all()}
        if pool in known:
            return known[pool]
        shown = pool[:ID_SHOWN]
        if self._clock.monotonic() - self._started_at < SILENT_S:
            raise UnavailableError(
                f"Pool {shown} has not reported to this gateway yet.", field="pool", retry_after_s=RETRY_S
            )
        ids = ", ".join(known) if known else "none"
        raise PoolNotFoundError(f"There is no pool {shown}. Known pools: {ids}.", field="pool")

    async def order(self, order: OrderPool) -> PoolOrders:
        """Store an order. Returns all orders of its pool. Raises NotFoundError if the store has no report."""
        return await self._bus.call(subjects.ORDER_POOL, order)

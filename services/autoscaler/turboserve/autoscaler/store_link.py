"""Reports the pool's paid workers to the state store every second, and receives the pool's orders."""

from __future__ import annotations

import asyncio

from pydantic import ValidationError

from turboserve import logs, subjects
from turboserve.autoscaler.control_loop import ControlLoop
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.worker_usage import WorkerUsage
from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.pool import PoolReport
from turboserve.ids import new_id

REPORT_S = 1.0

log = logs.get("autoscaler")


class StoreLink:
    """Sends complete reports, so that a lost report costs one second."""

    def __init__(self, bus: Bus, clock: Clock, pool: Pool, usage: WorkerUsage, loop: ControlLoop) -> None:
        self._bus, self._clock = bus, clock
        self._pool, self._usage, self._loop = pool, usage, loop
        self._process = new_id("asc")
        """Id of this process, since the ages of rentals are by its clock."""
        self.problem: str | None = None
        """Why the last report got no orders; None if it did."""

    async def run(self) -> None:
        """Report every second. Never returns."""
        while True:
            await self.report()
            await asyncio.sleep(REPORT_S)

    async def report(self) -> None:
        """Send one report and apply the orders in the answer."""
        # Before the provider's first listing, running workers may be missing here, so report no rentals.
        rentals = self._usage.rentals(self._clock.monotonic()) if self._pool.adopted else None
        report = PoolReport(
            pool=self._pool.name,
            model=self._loop.model,
            maximum=self._loop.maximum,
            process=self._process,
            rentals=rentals,
        )
        try:
            orders = await self._bus.call(subjects.REPORT_POOL, report)
        except (TurboServeError, ValidationError) as error:
            # Unreadable orders change nothing. The orders in force remain.
            if self.problem is None:
                log.warning("stored pool orders not available", error=str(error))
            self.problem = f"stored pool orders not available: {_brief(error)}"
            return
        self.problem = None
        self._usage.acknowledged(rentals or ())
        self._loop.ordered(orders, self._clock.monotonic())


def _brief(error: TurboServeError | ValidationError) -> str:
    if isinstance(error, TurboServeError):
        return error.detail
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"

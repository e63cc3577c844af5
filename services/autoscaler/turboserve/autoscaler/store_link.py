"""Every second: the state store hears what the pool pays for, and says what is ordered of it."""

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
    """Losing a report costs a second: the next one says all of it again."""

    def __init__(self, bus: Bus, clock: Clock, pool: Pool, usage: WorkerUsage, loop: ControlLoop) -> None:
        self._bus, self._clock = bus, clock
        self._pool, self._usage, self._loop = pool, usage, loop
        self._process = new_id("asc")
        """The ages of rentals are by the clock of this process."""
        self.problem: str | None = None
        """Why the pool's orders are not known as of now; None: they are."""

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self.report()
            await asyncio.sleep(REPORT_S)

    async def report(self) -> None:
        """Tell and hear once."""
        # Before the provider has said what lives, who is not listed here might well be there.
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
            # Orders that cannot be read change nothing: those in force stay.
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

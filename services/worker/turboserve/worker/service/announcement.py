"""Being known while the model loads: people, the pool and the bill see a worker that starts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.workers import LoadReport, WorkerPhase
from turboserve.tasks import stop
from turboserve.worker.service import inputs as told
from turboserve.worker.service.heartbeat import Heartbeat
from turboserve.worker.settings import Settings


def starting(worker: str, settings: Settings, device: str, now: float) -> LoadReport:
    """What a worker says of itself before it can serve: no place, no profile."""
    return LoadReport(
        worker=worker,
        model=settings.model,
        capacity=0,
        phase=WorkerPhase.STARTING,
        device=device,
        pid=os.getpid(),
        pool_slot=settings.pool_slot,
        started_at=now,
    )


@asynccontextmanager
async def announced(
    report: LoadReport, settings: Settings, bus: Bus, clock: Clock, gone: Callable[[str], None]
) -> AsyncIterator[None]:
    """Renew as `report` says while the body runs; if it raises, leave. `gone` as in Worker."""
    heartbeat = Heartbeat(bus, clock, settings.heartbeat_s, lambda: report, _ignore, gone)
    beating = asyncio.create_task(heartbeat.run(), name="announcement")
    try:
        yield
    except BaseException:
        await stop(beating)
        await heartbeat.leave()
        raise
    # Not cut short: a renewal that is carried out late would say again that the worker starts.
    heartbeat.end()
    await beating


def _ignore(_: told.Input) -> None:
    """Nothing is assigned to a worker that starts, and a drain is said again."""

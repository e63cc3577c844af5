"""A worker process that registers, renews and reports like a real one, and runs no sessions.

The file named by RENEWING_MODE holds its mode at start: `ready`, `never` (loads for ever), `crash`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from turboserve import service, subjects
from turboserve.config import Settings
from turboserve.contracts.errors import TurboServeError, WorkerGoneError
from turboserve.contracts.requests import Renew
from turboserve.contracts.workers import LoadReport, WorkerPhase

MODE = Path(os.environ["RENEWING_MODE"]).read_text().strip()


async def start(runtime: service.Runtime) -> None:
    worker = os.environ["TURBOSERVE_WORKER_ID"]
    phase = WorkerPhase.STARTING if MODE == "never" else WorkerPhase.READY

    async def beat() -> None:
        nonlocal phase
        while True:
            report = LoadReport(
                worker=worker,
                model=os.environ.get("TURBOSERVE_MODEL", "quiet"),
                capacity=2,
                phase=phase,
                pid=os.getpid(),
                pool_member=os.environ["TURBOSERVE_POOL_MEMBER"],
            )
            try:
                renewal = await runtime.bus.call(subjects.RENEW, Renew(load=report))
                if renewal.drain:
                    phase = WorkerPhase.DRAINING
                await runtime.bus.publish(subjects.LOAD, worker, report)
            except WorkerGoneError:
                raise
            except TurboServeError:
                pass
            await asyncio.sleep(0.2)

    runtime.spawn(beat(), "beat")


if MODE == "crash":
    sys.exit(3)
service.run("worker", Settings(), start)

"""A scheduler or an autoscaler whose cores are recorded: `python -m …`, with two more variables."""

from __future__ import annotations

import os
from pathlib import Path

from turboserve import service
from turboserve.autoscaler import app as autoscaler
from turboserve.autoscaler.__main__ import provider_of
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.autoscaler.shell import Shell
from turboserve.experiments.agreement.recording import Recorder
from turboserve.scheduler import app as scheduler
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.service import Runtime

FILE = "TURBOSERVE_RECORDED_FILE"
"""Beginning of the file's path. Each process has a file of its own."""
SERVICE = "TURBOSERVE_RECORDED_SERVICE"


def main() -> None:
    name, recorder = os.environ[SERVICE], Recorder(Path(f"{os.environ[FILE]}.{os.getpid()}.pickle"))
    if name == "scheduler":
        settings = service.load(name, SchedulerSettings)

        def core(settings: SchedulerSettings) -> Scheduler:
            return recorder.scheduler(scheduler.core_of(settings), settings)

        async def start_scheduler(runtime: Runtime) -> None:
            await scheduler.start(runtime, settings, core)

        service.run(name, settings, start_scheduler)
        return
    pool_settings = service.load(name, AutoscalerSettings)

    async def start_autoscaler(runtime: Runtime) -> None:
        def recorded(shell: Shell) -> None:
            recorder.autoscaler(shell, pool_settings)

        await autoscaler.start(runtime, pool_settings, lambda: provider_of(pool_settings), recorded)

    service.run(name, pool_settings, start_autoscaler)


if __name__ == "__main__":
    main()

"""`python -m turboserve.scheduler`."""

from __future__ import annotations

from turboserve import service
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.placement import LeastLoaded
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.scheduler.shell import serve


def main() -> None:
    settings = SchedulerSettings()

    async def start(runtime: service.Runtime) -> None:
        await serve(runtime, Scheduler(LeastLoaded(), settings.policy()), settings.tick_s)

    service.run("scheduler", settings, start)


if __name__ == "__main__":
    main()

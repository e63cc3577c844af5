"""`python -m turboserve.scheduler`."""

from __future__ import annotations

import turboserve.program_start  # noqa: F401
from turboserve import service
from turboserve.scheduler import app
from turboserve.scheduler.settings import SchedulerSettings


def main() -> None:
    settings = service.load("scheduler", SchedulerSettings)
    # Check the order of the lease's times before connecting to anything.
    settings.leadership()

    async def start(runtime: service.Runtime) -> None:
        await app.start(runtime, settings)

    service.run("scheduler", settings, start)


if __name__ == "__main__":
    main()

"""`python -m turboserve.scheduler`."""

from __future__ import annotations

from turboserve import service
from turboserve.scheduler import app
from turboserve.scheduler.settings import SchedulerSettings


def main() -> None:
    settings = service.load("scheduler", SchedulerSettings)
    # Before connecting to anything: settings that are out of order are known now.
    settings.leadership()

    async def start(runtime: service.Runtime) -> None:
        await app.start(runtime, settings)

    service.run("scheduler", settings, start)


if __name__ == "__main__":
    main()

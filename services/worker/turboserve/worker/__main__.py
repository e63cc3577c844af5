"""Run one worker until a signal: `python -m turboserve.worker`."""

import turboserve.program_start  # noqa: F401
from turboserve import service
from turboserve.worker.service.app import start
from turboserve.worker.settings import Settings

if __name__ == "__main__":
    service.run("worker", service.load("worker", Settings), start)

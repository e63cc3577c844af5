"""What a stack's processes get of the environment of `turboserve up`."""

from __future__ import annotations

import os

from turboserve import environment
from turboserve.cli.settings import names
from turboserve.cli.stack.decode_pool import DECODE_WORKER

PER_WORKER = frozenset({"TURBOSERVE_WORKER_ID", "TURBOSERVE_POOL_MEMBER"})
"""Settings that the autoscaler sets for each worker."""


def inherited(service: str) -> dict[str, str]:
    """Return what `service` gets of this process's environment: a base, and the settings that it declares."""
    base: tuple[str, ...] = environment.SERVICE
    if service == DECODE_WORKER:
        return environment.child(os.environ, (*base, *environment.DEVICE), names("worker") - PER_WORKER)
    settings = names(service)
    if service == "autoscaler":
        # The autoscaler passes the workers' part on to them.
        further = environment.listed(os.environ.get("TURBOSERVE_POOL_WORKER_VARIABLES", ""))
        base = (*base, *environment.DEVICE, *environment.CLUSTER, *further)
        settings |= environment.WORKER_SETTINGS - PER_WORKER
    return environment.child(os.environ, base, settings)

"""Assembles an autoscaler over any provider and starts it in the service runner."""

from __future__ import annotations

from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.identities import WorkerNames
from turboserve.autoscaler.providers.base import PoolProvider
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.autoscaler.shell import Shell, is_ready
from turboserve.service import Runtime

STOP_GRACE_S = 3.5
"""Grace period of workers at a stop, in seconds. It fits into the five seconds that a service has to stop."""


async def start(runtime: Runtime, settings: AutoscalerSettings, provider: PoolProvider) -> Shell:
    """Start an autoscaler that runs the pool of `provider`."""
    names = WorkerNames(settings.worker_identities, lambda: pool.workers())
    pool = Pool(settings.pool_name, names.new, settings.policy())
    shell = Shell(runtime, pool, provider, settings)
    runtime.check("pool", lambda: is_ready(pool, provider.managed))
    runtime.on_stop(lambda: shell.stop(settings.pool_stop_with_autoscaler, STOP_GRACE_S))
    await shell.start()
    return shell

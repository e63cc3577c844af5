"""`python -m turboserve.autoscaler`."""

from __future__ import annotations

from turboserve import service
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.providers.base import PoolProvider
from turboserve.autoscaler.providers.external import ExternalProvider
from turboserve.autoscaler.providers.local import LocalProvider, pool_id, worker_environment
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.autoscaler.shell import Shell, is_ready
from turboserve.ids import new_id

STOP_GRACE_S = 3.5
"""A service's close has five seconds in all."""


def provider_of(settings: AutoscalerSettings) -> PoolProvider:
    if settings.provider == "external":
        return ExternalProvider()
    password = settings.worker_nats_password
    return LocalProvider(
        pool_id(settings.pool_name, settings.nats_url),
        settings.pool_worker_command,
        worker_environment(
            settings.pool_worker_threads,
            settings.worker_nats_user,
            None if password is None else password.get_secret_value(),
        ),
        settings.health_host,
    )


def main() -> None:
    settings = AutoscalerSettings()

    async def start(runtime: service.Runtime) -> None:
        pool = Pool(settings.pool_name, lambda: new_id("wrk"), settings.policy())
        provider = provider_of(settings)
        shell = Shell(runtime, pool, provider, settings)
        runtime.check("pool", lambda: is_ready(pool, provider.managed))
        runtime.on_stop(lambda: shell.stop(settings.pool_stop_with_autoscaler, STOP_GRACE_S))
        await shell.start()

    service.run("autoscaler", settings, start)


if __name__ == "__main__":
    main()

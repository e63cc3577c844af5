"""`python -m turboserve.autoscaler`."""

from __future__ import annotations

from turboserve import service
from turboserve.autoscaler import app
from turboserve.autoscaler.providers.base import PoolProvider
from turboserve.autoscaler.providers.external import ExternalProvider
from turboserve.autoscaler.providers.local import LocalProvider, pool_id, worker_environment
from turboserve.autoscaler.providers.ray import RayProvider
from turboserve.autoscaler.providers.ray_cluster import Needs, RayCluster, node_environment
from turboserve.autoscaler.settings import AutoscalerSettings


def provider_of(settings: AutoscalerSettings) -> PoolProvider:
    if settings.provider == "external":
        return ExternalProvider()
    pool = pool_id(settings.pool_name, settings.nats_url)
    password = settings.worker_nats_password
    environment = worker_environment(
        settings.pool_worker_threads,
        settings.worker_nats_user,
        None if password is None else password.get_secret_value(),
        settings.pool_worker_variables,
    )
    identities = settings.worker_identities
    if settings.provider == "local":
        return LocalProvider(
            pool, settings.pool_worker_command, environment, settings.health_host, identities
        )
    needs = Needs(settings.pool_worker_gpus, settings.ray_cpus, tuple(settings.ray_resources.items()))
    cluster = RayCluster(settings.ray_address, f"turboserve-{pool}")
    return RayProvider(
        pool,
        cluster,
        settings.pool_worker_command,
        node_environment(environment),
        needs,
        identities=identities,
    )


def main() -> None:
    settings = service.load("autoscaler", AutoscalerSettings)

    async def start(runtime: service.Runtime) -> None:
        await app.start(runtime, settings, provider_of(settings))

    service.run("autoscaler", settings, start)


if __name__ == "__main__":
    main()

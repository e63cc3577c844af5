"""`python -m turboserve.autoscaler`."""

from __future__ import annotations

from functools import partial

import turboserve.program_start  # noqa: F401
from turboserve import service
from turboserve.autoscaler import app
from turboserve.autoscaler.providers.base import PoolProvider
from turboserve.autoscaler.providers.external import ExternalProvider
from turboserve.autoscaler.providers.kubernetes import KubernetesProvider
from turboserve.autoscaler.providers.kubernetes_cluster import KubernetesCluster, read_template
from turboserve.autoscaler.providers.kubernetes_pod import Json
from turboserve.autoscaler.providers.local import LocalProvider, pool_id, worker_environment
from turboserve.autoscaler.providers.member_kinds import member_environment, member_needs, member_pod
from turboserve.autoscaler.providers.ray import RayProvider
from turboserve.autoscaler.providers.ray_cluster import RayCluster, node_environment
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.contracts.errors import InvalidInputError


def pod_template(settings: AutoscalerSettings) -> Json | None:
    """Read the template of workers' pods if the provider needs one. Raises InvalidInputError."""
    if settings.provider != "kubernetes" or settings.kubernetes_pod_template is None:
        return None
    return read_template(settings.kubernetes_pod_template)


def provider_of(settings: AutoscalerSettings, template: Json | None = None) -> PoolProvider:
    """`template` is the result of `pod_template`."""
    if settings.provider == "external":
        return ExternalProvider()
    # A namespace is one stack, whose broker may get another address while its pods run.
    if settings.provider == "kubernetes":
        scope = settings.kubernetes_namespace
    else:
        scope = settings.pool_scope or settings.nats_url
    pool = pool_id(settings.pool_name, scope)
    if template is not None:
        return KubernetesProvider(
            pool,
            KubernetesCluster(settings.kubernetes_namespace, settings.kubernetes_config),
            template,
            settings.worker_identities,
            settings.kubernetes_identity_secret,
            partial(member_pod, settings),
        )
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
            pool,
            settings.pool_worker_command,
            environment,
            settings.health_host,
            identities,
            partial(member_environment, settings),
        )
    cluster = RayCluster(settings.ray_address, f"turboserve-{pool}")
    return RayProvider(
        pool,
        cluster,
        settings.pool_worker_command,
        node_environment(environment),
        member_needs(settings),
        identities=identities,
    )


def main() -> None:
    settings = service.load("autoscaler", AutoscalerSettings)

    try:
        template = pod_template(settings)
    except InvalidInputError as error:
        service.refuse("autoscaler", [f"TURBOSERVE_KUBERNETES_POD_TEMPLATE: {error.field}: {error.detail}"])

    async def start(runtime: service.Runtime) -> None:
        await app.start(runtime, settings, lambda: provider_of(settings, template))

    service.run("autoscaler", settings, start)


if __name__ == "__main__":
    main()

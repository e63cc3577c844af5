"""What each pool member's worker is, by the pool file: its variables, and what it takes of a cluster."""

from __future__ import annotations

from functools import partial

from turboserve.autoscaler.pool_file import WorkerKind
from turboserve.autoscaler.pool_members import parts_of
from turboserve.autoscaler.providers.kubernetes_pod import ALIKE, PodKind
from turboserve.autoscaler.providers.ray_cluster import MemberNeeds, Needs
from turboserve.autoscaler.settings import AutoscalerSettings


def member_environment(settings: AutoscalerSettings, member: str) -> dict[str, str]:
    """Return the variables that a worker has because of its offer; none without a pool file."""
    offer = _offer_of(settings, member)
    return {} if settings.pool_file is None or offer is None else settings.pool_file.environment_of(offer)


def member_needs(settings: AutoscalerSettings) -> MemberNeeds:
    """Return what the workers take of a Ray cluster."""
    file, common = settings.pool_file, tuple(settings.ray_resources.items())
    usual = Needs(settings.pool_worker_gpus, settings.ray_cpus, common)
    if file is None:
        return MemberNeeds.alike(usual)

    def of_kind(kind: WorkerKind) -> Needs:
        cpus = settings.ray_cpus if kind.cpus is None else kind.cpus
        return Needs(kind.gpus, cpus, tuple({**dict(common), **kind.resources}.items()))

    def of_member(member: str) -> Needs:
        kind = _kind_of(settings, member)
        return usual if kind is None else of_kind(kind)

    used = {offer.kind for offer in file.offers}
    every = tuple(of_kind(kind) for name, kind in file.kinds.items() if name in used)
    return MemberNeeds(of_member, every, partial(member_environment, settings))


def member_pod(settings: AutoscalerSettings, member: str) -> PodKind:
    """Return what a worker's pod has beside the pod template."""
    kind = _kind_of(settings, member)
    if kind is None:
        return ALIKE
    return PodKind(kind.node_selector, kind.limits, member_environment(settings, member))


def _kind_of(settings: AutoscalerSettings, member: str) -> WorkerKind | None:
    offer = _offer_of(settings, member)
    return None if settings.pool_file is None or offer is None else settings.pool_file.kind_of(offer)


def _offer_of(settings: AutoscalerSettings, member: str) -> str | None:
    parts = parts_of(member, settings.pool_name)
    return None if parts is None else parts[0]

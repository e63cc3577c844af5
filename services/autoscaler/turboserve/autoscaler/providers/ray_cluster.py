"""Access to a Ray cluster: every call runs on a thread, has a deadline and raises typed errors."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from turboserve.autoscaler.providers import ray_host
from turboserve.autoscaler.providers.base import ProviderError

T = TypeVar("T")
CALL_S = 10.0
RETRY_S = 2.0
THREADS = 32
"""Maximum number of simultaneous calls. A call that waits for a node must not delay the others."""


class RayError(ProviderError):
    """The cluster cannot be reached, does not answer in time or refuses a call."""

    code, title = "ray", "Ray cluster"


class RayMissingError(ProviderError):
    """The package `ray` is not installed."""

    code, title = "ray_missing", "Ray is not installed"


@dataclass(frozen=True)
class Needs:
    """Resources of a node that one worker takes."""

    gpus: float = 1.0
    cpus: float = 1.0
    resources: tuple[tuple[str, float], ...] = ()

    @property
    def bundle(self) -> dict[str, float]:
        every = {"CPU": self.cpus, "GPU": self.gpus, **dict(self.resources)}
        return {name: amount for name, amount in every.items() if amount > 0}


@dataclass(frozen=True)
class MemberNeeds:
    """What the worker of each pool member takes and is started with."""

    of: Callable[[str], Needs]
    """Resources by pool member."""
    every: Collection[Needs]
    """The resources of each kind of worker."""
    variables: Callable[[str], Mapping[str, str]] = lambda member: {}
    """Further variables by pool member."""

    @classmethod
    def alike(cls, needs: Needs) -> MemberNeeds:
        """Return the needs of a pool whose workers are alike."""
        return cls(lambda member: needs, (needs,))


class RayCluster:
    """This process's connection to one cluster, made on first use.

    Ray ends a driver whose node is gone. The autoscaler then exits, its supervisor restarts it, and it adopts
    the living workers, as after any other crash.
    """

    def __init__(self, address: str, namespace: str, call_s: float = CALL_S) -> None:
        self._address, self.namespace, self._call_s = address, namespace, call_s
        self._connecting = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, "ray")

    async def call(self, work: Callable[[Any], T], longer_s: float = 0.0, what: str = "the cluster") -> T:
        """Run `work(ray)` on a thread.

        `longer_s` is the time that the work itself may wait. Raises RayError after the limit of a call plus
        `longer_s`; the work may still take effect later.
        """
        limit_s = self._call_s + longer_s
        try:
            async with asyncio.timeout(limit_s):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, lambda: work(self._connected()))
        except TimeoutError:
            detail = f"{what} did not answer within {limit_s:g} s"
            raise RayError(detail, field=self._address, limit=limit_s, retry_after_s=RETRY_S) from None
        except ProviderError:
            raise
        except ImportError as error:
            detail = f"the provider needs `pip install turboserve-autoscaler[ray]`: {error}"
            raise RayMissingError(detail, field="provider") from None
        except Exception as error:
            # Ray's errors have no common base class. None of them may stop the pool.
            detail = f"{what}: {type(error).__name__}: {_brief(error)}"
            raise RayError(detail, field=self._address, retry_after_s=RETRY_S) from error

    def _connected(self) -> Any:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        with self._connecting:
            if not ray.is_initialized():
                ray.init(
                    address=self._address,
                    namespace=self.namespace,
                    log_to_driver=False,
                    configure_logging=False,
                    include_dashboard=None,
                )
        return ray


# Reservations: Ray's placement groups. Call these in `RayCluster.call`.


def reserve_group(name: str, bundle: Mapping[str, float], wait_s: float) -> bool:
    """Make the detached placement group `name` if it does not exist. Returns whether it has its resources.

    Waits for the resources for up to `wait_s` seconds.
    """
    from ray.util import get_placement_group, placement_group

    try:
        group = get_placement_group(name)
    except ValueError:
        group = placement_group([dict(bundle)], strategy="PACK", name=name, lifetime="detached")
    return bool(group.wait(wait_s))


def remove_group(name: str) -> None:
    """Remove the placement group `name`, if it exists."""
    from ray.util import get_placement_group, remove_placement_group

    try:
        remove_placement_group(get_placement_group(name))
    except ValueError:
        return


def remove_groups_besides(prefix: str, used: Collection[str]) -> None:
    """Remove the placement groups whose names begin with `prefix` and are not in `used`."""
    from ray.util import get_placement_group, placement_group_table, remove_placement_group

    for group in placement_group_table().values():
        name = group["name"]
        if name.startswith(prefix) and name not in used and group["state"] != "REMOVED":
            remove_placement_group(get_placement_group(name))


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""


def node_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the autoscaler's environment that a worker on another machine gets."""
    only_here = ("TURBOSERVE_HEALTH_", "TURBOSERVE_LIFELINE_")
    return {
        name: value
        for name, value in environment.items()
        if name == "OMP_NUM_THREADS" or (name.startswith("TURBOSERVE_") and not name.startswith(only_here))
    }


def find_actor(ray: Any, name: str, namespace: str) -> Any:
    """Return the actor of this name; None if there is none."""
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def living_actor(ray: Any, name: str, namespace: str, probe_s: float) -> Any:
    """Return the actor of this name if its worker lives, else None. An actor without a worker is ended."""
    actor = find_actor(ray, name, namespace)
    if actor is None:
        return None
    try:
        if ray.get(actor.alive.remote(), timeout=probe_s):
            return actor
    except ray.exceptions.RayActorError:
        return None
    ray.kill(actor, no_restart=True)
    return None


def actor_names(ray: Any, namespace: str) -> list[str]:
    """Return the names of the namespace's actors, sorted, including those that are being made."""
    every = ray.util.list_named_actors(all_namespaces=True)
    return sorted(one["name"] for one in every if one["namespace"] == namespace)


def make_host(ray: Any, bundle: Mapping[str, float], group: str, name: str, namespace: str) -> Any:
    """Make the detached actor of a worker in the placement group `group`, and return it."""
    from ray.util import get_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(ray_host)
    needs = dict(bundle)
    return (
        ray.remote(ray_host.WorkerHost)
        .options(
            name=name,
            namespace=namespace,
            lifetime="detached",
            max_restarts=0,
            num_cpus=needs.pop("CPU", 0),
            num_gpus=needs.pop("GPU", 0),
            resources=needs,
            scheduling_strategy=PlacementGroupSchedulingStrategy(get_placement_group(group)),
        )
        .remote()
    )

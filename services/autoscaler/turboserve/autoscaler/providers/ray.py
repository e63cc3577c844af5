"""Runs workers as actors of a Ray cluster. Ray's scheduler finds the node; Ray's autoscaler adds nodes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cachetools import LRUCache
from pydantic import SecretStr

from turboserve import lifeline, logs, telemetry
from turboserve.autoscaler.identities import credentials
from turboserve.autoscaler.providers import ray_host
from turboserve.autoscaler.providers.base import (
    Health,
    LaunchError,
    NoResourcesError,
    OnExit,
    PoolProvider,
    ProviderError,
    ProviderWorker,
    StuckError,
)
from turboserve.autoscaler.providers.local import WORKER_BASE, WORKER_VARIABLES
from turboserve.autoscaler.providers.process import status_text
from turboserve.autoscaler.providers.ray_cluster import (
    RETRY_S,
    MemberNeeds,
    RayCluster,
    actor_names,
    find_actor,
    living_actor,
    make_host,
    remove_group,
    remove_groups_besides,
    reserve_group,
)
from turboserve.environment import CLUSTER
from turboserve.tasks import stop

log = logs.get("pool")
RESERVE_S = 10.0
"""Time-out of a reservation, seconds. The cluster keeps one that takes longer; the core asks for it again."""
LAUNCH_S = 25.0
REMEMBERED = 4_096
"""Ended actors that are remembered."""
PROBE_S = 5.0
FINAL_REPORT_TIMEOUT_S = 5.0
SEPARATOR = "/"
INHERITED = [*WORKER_BASE, *CLUSTER, *sorted(WORKER_VARIABLES - {lifeline.FD_VARIABLE})]
"""Variables of its node's environment that a worker gets."""


class RayProvider(PoolProvider):
    """Runs one detached actor per worker.

    An actor has the name `member/worker` in the pool's namespace and is in a placement group named after the
    member. Names and groups outlive the autoscaler, so the next one finds them. The actor starts the worker's
    process on its node, with `command` and `environment`.
    """

    name: ClassVar[str] = "ray"

    def __init__(
        self,
        pool: str,
        cluster: RayCluster,
        command: Sequence[str],
        environment: Mapping[str, str],
        needs: MemberNeeds,
        launch_s: float = LAUNCH_S,
        identities: Mapping[str, SecretStr] | None = None,
    ) -> None:
        self._pool, self._cluster, self._needs, self._launch_s = pool, cluster, needs, launch_s
        # None stands for the node's own Python, which may have another path than this machine's.
        self._command = [None if part == sys.executable else part for part in command]
        self._environment = dict(environment)
        self._identities = identities or {}
        self._actors: dict[str, tuple[ProviderWorker, Any]] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._on_exit: OnExit | None = None
        self._ended: LRUCache[str, None] = LRUCache(REMEMBERED)
        """Actors that this process has ended. The cluster may list them for a moment."""
        self._swept = False
        self._spawning = asyncio.Lock()
        """Held while actors are made or listed, so that `adopt` does not end one that is still starting."""

    def watch(self, on_exit: OnExit) -> None:
        self._on_exit = on_exit

    async def adopt(self) -> list[ProviderWorker]:
        async with self._spawning:
            for name in await self._names():
                member, _, worker = name.partition(SEPARATOR)
                if worker and worker not in self._actors:
                    await self._take(ProviderWorker(member, worker), name)
            if not self._swept:
                await self._give_back_what_is_left()
                self._swept = True
        return [provider_worker for provider_worker, _ in self._actors.values()]

    async def _take(self, provider_worker: ProviderWorker, name: str) -> None:
        """Watch an actor that an earlier autoscaler made. An actor without a worker is ended."""
        namespace = self._cluster.namespace
        what = f"actor {name}"
        actor = await self._cluster.call(lambda ray: living_actor(ray, name, namespace, PROBE_S), what=what)
        if actor is None:
            self._ended[name] = None
        else:
            self._keep(provider_worker, actor)
            log.info("worker adopted", worker=provider_worker.worker, member=provider_worker.member)

    async def _give_back_what_is_left(self) -> None:
        """Give back reservations of an earlier autoscaler for members without a living worker."""
        mine, prefix = {known.member for known, _ in self._actors.values()}, f"{self._pool}{SEPARATOR}"

        def remove(ray: Any) -> None:
            # Another autoscaler may have started workers since this one listed them.
            members = mine | self._members(ray)
            remove_groups_besides(prefix, {self._group(member) for member in members})

        await self._cluster.call(remove, what="the list of reservations")

    async def reserve(self, member: str) -> None:
        bundle, name = self._needs.of(member).bundle, self._group(member)
        what = f"the reservation of {member}"
        if not await self._cluster.call(lambda _: reserve_group(name, bundle, RESERVE_S), RESERVE_S, what):
            raise NoResourcesError(
                f"no node of the cluster has {bundle} free; the request stays queued",
                field=member,
                limit=str(bundle),
                retry_after_s=RETRY_S,
            )

    async def launch(self, member: str, worker: str) -> ProviderWorker:
        async with self._spawning:
            for name in await self._names():
                its_member, _, its_worker = name.partition(SEPARATOR)
                if its_worker == worker and worker in self._actors:
                    return self._actors[worker][0]
                # Also of another autoscaler, which `adopt` has not listed yet: a second actor would wait for
                # the member's reservation until the launch times out.
                if its_member == member and (its_worker in self._actors or name not in self._ended):
                    raise LaunchError(
                        f"pool member {member} still has {its_worker}", field=member, retry_after_s=1.0
                    )
            return await self._launch(ProviderWorker(member, worker))

    async def _launch(self, provider_worker: ProviderWorker) -> ProviderWorker:
        await self.reserve(provider_worker.member)
        group_name, namespace = self._group(provider_worker.member), self._cluster.namespace
        name, bundle = _actor_name(provider_worker), self._needs.of(provider_worker.member).bundle
        environment = {
            **self._environment,
            **self._needs.variables(provider_worker.member),
            **credentials(provider_worker.worker, self._identities),
            "TURBOSERVE_POOL_MEMBER": provider_worker.member,
            "TURBOSERVE_WORKER_ID": provider_worker.worker,
        }
        telemetry.set_traceparent(environment)

        def make(ray: Any) -> tuple[Any, str | None]:
            actor = make_host(ray, bundle, group_name, name, namespace)
            try:
                return actor, ray.get(
                    actor.start.remote(self._command, environment, INHERITED), timeout=self._launch_s
                )
            except Exception as error:
                # The actor may still start later. End it, since the core treats the launch as failed.
                ray.kill(actor, no_restart=True)
                return actor, f"{type(error).__name__}: its actor did not start within {self._launch_s:g} s"

        try:
            actor, fault = await self._cluster.call(make, self._launch_s, f"the launch of {name}")
        except ProviderError as error:
            await self._forget(name)
            raise LaunchError(error.detail, field=provider_worker.member, retry_after_s=RETRY_S) from None
        if fault is not None:
            await self._forget(name)
            raise LaunchError(fault, field=provider_worker.member, retry_after_s=RETRY_S)
        self._keep(provider_worker, actor)
        return provider_worker

    async def ready(self, worker: str) -> bool:
        if worker not in self._actors:
            return False
        actor = self._actors[worker][1]
        try:
            return bool(await self._cluster.call(lambda ray: ray.get(actor.ready.remote(), timeout=PROBE_S)))
        except ProviderError:
            return False

    async def drain(self, worker: str) -> None:
        """Do nothing: a process needs no preparation."""

    async def release(self, member: str, worker: str | None, grace_s: float) -> None:
        if worker is not None:
            # An additional worker of a member is released under another name than its actor's member.
            known = self._actors.get(worker)
            place = member if known is None else known[0].member
            await self._end(_actor_name(ProviderWorker(place, worker)), worker, grace_s)
        name = self._group(member)

        def remove(ray: Any) -> None:
            # This process may have been suspended, and its successor have a worker in the member.
            if member not in self._members(ray):
                remove_group(name)

        await self._cluster.call(remove, what=f"the reservation of {member}")

    async def _end(self, name: str, worker: str, grace_s: float) -> None:
        namespace, limit_s = self._cluster.namespace, grace_s + ray_host.KILL_S + FINAL_REPORT_TIMEOUT_S

        def end(ray: Any) -> bool:
            actor = find_actor(ray, name, namespace)
            if actor is None:
                return True
            try:
                ended = bool(ray.get(actor.stop.remote(grace_s), timeout=limit_s))
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                # The worker's process ends with the actor, or the node is gone.
                ended = True
            if ended:
                ray.kill(actor, no_restart=True)
            return ended

        if not await self._cluster.call(end, limit_s, f"the end of {name}"):
            raise StuckError(f"the process of {name} does not end", field=worker, retry_after_s=5.0)
        self._ended[name] = None
        watching = self._watching.get(worker)
        if watching is not None:
            # Report the exit before `release` returns and frees the member.
            await asyncio.wait({watching}, timeout=FINAL_REPORT_TIMEOUT_S)

    async def health(self) -> Health:
        try:
            there = await self._cluster.call(lambda ray: ray.cluster_resources())
        except ProviderError as error:
            return Health(False, error.detail)
        every = [amount for needs in self._needs.every for amount in needs.bundle.items()]
        short = sorted({name for name, amount in every if there.get(name, 0.0) < amount})
        return Health(not short, f"the cluster has no node with {', '.join(short)}" if short else "")

    async def close(self) -> None:
        await stop(*self._watching.values())

    # Watching

    def _keep(self, provider_worker: ProviderWorker, actor: Any) -> None:
        self._actors[provider_worker.worker] = (provider_worker, actor)
        self._watching[provider_worker.worker] = asyncio.create_task(self._until_end(provider_worker, actor))

    async def _until_end(self, provider_worker: ProviderWorker, actor: Any) -> None:
        try:
            status = status_text(await asyncio.wrap_future(actor.wait.remote().future()))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # The actor or its node has ended.
            status = (
                f"its actor has ended: {(str(error).strip() or type(error).__name__).splitlines()[0][:200]}"
            )
        del self._actors[provider_worker.worker], self._watching[provider_worker.worker]
        if self._on_exit is not None:
            self._on_exit(provider_worker.worker, status)
        await self._forget(_actor_name(provider_worker))

    async def _forget(self, name: str) -> None:
        """End an actor without a worker. If this fails, the next listing finds the actor again."""
        namespace = self._cluster.namespace
        self._ended[name] = None

        def kill(ray: Any) -> None:
            if (actor := find_actor(ray, name, namespace)) is not None:
                ray.kill(actor, no_restart=True)

        try:
            await self._cluster.call(kill, what=f"actor {name}")
        except ProviderError as error:
            log.info("orphaned actor ended", actor=name, error=error.detail)

    async def _names(self) -> list[str]:
        """Return the names of the pool's actors, including those that are being made."""
        namespace = self._cluster.namespace
        return await self._cluster.call(lambda ray: actor_names(ray, namespace), what="the list of actors")

    def _members(self, ray: Any) -> set[str]:
        """Return the pool members that have an actor, of whichever process. Call this on a thread of Ray."""
        names = actor_names(ray, self._cluster.namespace)
        return {name.partition(SEPARATOR)[0] for name in names if name not in self._ended}

    def _group(self, member: str) -> str:
        return f"{self._pool}{SEPARATOR}{member}"


def _actor_name(provider_worker: ProviderWorker) -> str:
    return f"{provider_worker.member}{SEPARATOR}{provider_worker.worker}"

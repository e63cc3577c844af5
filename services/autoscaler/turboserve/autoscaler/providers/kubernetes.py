"""Runs workers as pods of a Kubernetes namespace. Kubernetes finds the node; its autoscaler adds nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import aclosing
from typing import ClassVar

from cachetools import LRUCache

from turboserve import logs, telemetry
from turboserve.autoscaler.providers.base import (
    Health,
    LaunchError,
    OnExit,
    PoolProvider,
    ProviderError,
    ProviderWorker,
    StuckError,
)
from turboserve.autoscaler.providers.kubernetes_cluster import RETRY_S, KubernetesCluster, KubernetesError
from turboserve.autoscaler.providers.kubernetes_pod import (
    ALIKE,
    DRAINING,
    Json,
    Pod,
    PodKind,
    parsed,
    pod_name,
    pod_of,
    selector,
)
from turboserve.backoff import backoff_s
from turboserve.broker_accounts import worker_user
from turboserve.contracts.errors import InvalidInputError
from turboserve.subject_types import identity_of
from turboserve.tasks import stop

log = logs.get("pool")
STUCK_S = 15.0
"""A pod that is there this long after its grace period is stuck, seconds."""
LOOK_S = 1.0
"""Interval of looks at a pod that shall end, in case the watch is late, seconds."""
REMOVAL_LOOKS = 5
"""Number of looks at an ended pod until its removal counts as late."""
LONGEST_RETRY_S = 30.0
SHORT_WATCH_S = 1.0
"""A watch that ends sooner counts as a failure, so that the next one waits, seconds."""
REFUSED = range(400, 500)
"""HTTP statuses after which certainly nothing was created."""
REMEMBERED = 4_096
"""Ended pods whose late events are recognized."""


class KubernetesProvider(PoolProvider):
    """Runs one pod per worker, made from the operator's template.

    A pod's name follows from its pool member, so that the API server refuses a second worker of a member,
    also from another autoscaler. Labels name pool, member and worker, so that the next autoscaler finds the
    pods.
    A pod never restarts its worker: a worker id is used once. One watch reports the ends of all pods; after
    each interruption, a list shows what the watch has missed.

    `identities` names the broker identities of workers; `identity_secret` is the Secret that has the password
    of each under its name. No password stands in a pod.
    """

    name: ClassVar[str] = "kubernetes"

    def __init__(
        self,
        pool: str,
        cluster: KubernetesCluster,
        template: Json,
        identities: Collection[str] = (),
        identity_secret: str | None = None,
        of_member: Callable[[str], PodKind] = lambda member: ALIKE,
    ) -> None:
        """`of_member`: what the pod of a pool member has beside the template."""
        self._pool, self._cluster, self._template = pool, cluster, template
        self._identities, self._identity_secret = frozenset(identities), identity_secret
        self._of_member = of_member
        self._pods: dict[str, Pod] = {}
        """Living pods by worker."""
        self._gone: LRUCache[str, None] = LRUCache(REMEMBERED)
        """Uids of pods whose end was reported. The watch may still report their last changes."""
        self._on_exit: OnExit | None = None
        self._watching: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        """Held while a pod is created or pods are listed. An earlier list lacks the new pod."""
        self._changed = asyncio.Condition()

    def watch(self, on_exit: OnExit) -> None:
        self._on_exit = on_exit
        self._watching = asyncio.create_task(self._watch(), name="pods")

    async def adopt(self) -> list[ProviderWorker]:
        await self._list()
        return [ProviderWorker(pod.member, pod.worker) for pod in self._pods.values()]

    async def reserve(self, member: str) -> None:
        """Do nothing: a pod that waits for a node is the reservation."""

    async def launch(self, member: str, worker: str) -> ProviderWorker:
        secrets, kind = {}, self._of_member(member)
        variables = {
            **kind.variables,
            "TURBOSERVE_POOL_MEMBER": member,
            "TURBOSERVE_WORKER_ID": worker,
        }
        identity = identity_of(worker)
        if identity in self._identities and self._identity_secret is not None:
            variables["TURBOSERVE_NATS_USER"] = worker_user(identity)
            secrets["TURBOSERVE_NATS_PASSWORD"] = (self._identity_secret, identity)
        telemetry.set_traceparent(variables)
        try:
            pod = pod_of(kind.applied_to(self._template), self._pool, member, worker, variables, secrets)
        except InvalidInputError as error:
            raise LaunchError(error.detail, field=error.field, limit=error.limit) from None
        async with self._changing:
            # A second attempt follows the removal of an ended pod that has the name.
            for _ in range(2):
                try:
                    self._keep(parsed(await self._cluster.create(pod)))
                    return ProviderWorker(member, worker)
                except KubernetesError as error:
                    if error.status_code == 409:
                        found = await self._free(member, worker)
                        if found is not None:
                            return found
                    elif error.status_code in REFUSED:
                        raise LaunchError(error.detail, field=member, retry_after_s=RETRY_S) from None
                    else:
                        raise
        raise LaunchError(f"the pod of {member} is still being removed", field=member, retry_after_s=RETRY_S)

    async def _free(self, member: str, worker: str) -> ProviderWorker | None:
        """Look at the pod that has the member's name. Returns this worker's; removes an ended one.

        Raises LaunchError if another worker lives there.
        """
        found = await self._cluster.get(pod_name(self._pool, member))
        if found is None:
            return None
        pod = parsed(found)
        if pod.living and pod.worker == worker:
            self._keep(pod)
            return ProviderWorker(member, worker)
        if pod.worker == worker:
            # A worker id is used once.
            raise LaunchError(f"{worker} has ended: {pod.end}", field="worker", retry_after_s=RETRY_S)
        if pod.living:
            raise LaunchError(f"pool member {member} still has {pod.worker}", field=member, retry_after_s=1.0)
        self._ended(pod.worker, pod.end)
        await self._cluster.delete(pod.name, pod.uid, 0)
        for _ in range(REMOVAL_LOOKS):
            if await self._present(pod) is None:
                break
            await self._wait_for_a_change()
        return None

    async def ready(self, worker: str) -> bool:
        pod = self._pods.get(worker)
        if pod is None:
            return False
        try:
            now = await self._present(pod)
        except ProviderError:
            return False
        return now is not None and now.living and now.ready

    async def drain(self, worker: str) -> None:
        """Annotate the pod, for people who look at it."""
        pod = self._pods.get(worker)
        if pod is not None:
            await self._cluster.annotate(pod.name, {DRAINING: "true"})

    async def release(self, member: str, worker: str | None, grace_s: float) -> None:
        # An additional worker of a member is released under another name than its pod's member.
        known = self._pods.get(worker or "")
        found = await self._cluster.get(known.name if known else pod_name(self._pool, member))
        if found is None:
            return
        pod = parsed(found)
        if worker is not None and pod.worker != worker:
            return
        # The kubelet forces the end after the grace period. Until the pod is gone, the worker may run.
        await self._cluster.delete(pod.name, pod.uid, grace_s)
        try:
            async with asyncio.timeout(grace_s + STUCK_S):
                while (now := await self._present(pod)) is not None and now.living:
                    await self._wait_for_a_change()
        except TimeoutError:
            detail = f"pod {pod.name} of {pod.worker} does not end; its node may be unreachable"
            raise StuckError(detail, field=pod.worker, limit=grace_s + STUCK_S, retry_after_s=5.0) from None
        self._ended(pod.worker, "it was released")

    async def _present(self, pod: Pod) -> Pod | None:
        """Read the pod again. None if it is gone, also if another one has its name."""
        found = await self._cluster.get(pod.name)
        now = None if found is None else parsed(found)
        return now if now is not None and now.uid == pod.uid else None

    async def _wait_for_a_change(self) -> None:
        async with self._changed:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                return

    async def health(self) -> Health:
        try:
            await self._cluster.list(f"{selector(self._pool)},turboserve.io/probe")
        except ProviderError as error:
            return Health(False, error.detail)
        return Health(True)

    async def close(self) -> None:
        if self._watching is not None:
            await stop(self._watching)
        await self._cluster.close()

    async def _watch(self) -> None:
        failures = 0
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                version = await self._list()
                async with aclosing(self._cluster.watch(selector(self._pool), version)) as events:
                    async for kind, found in events:
                        await self._see(kind, found)
                failures = failures + 1 if loop.time() - began < SHORT_WATCH_S else 0
            except ProviderError as error:
                expired = isinstance(error, KubernetesError) and error.status_code == 410
                failures += 1
                if not expired:
                    log.info("watch of pods interrupted", error=error.detail)
            except Exception as error:
                # The watch must go on, whatever the API server sent.
                failures += 1
                log.exception("watch of pods crashed", error=repr(error))
            await asyncio.sleep(backoff_s(failures, 0.2, LONGEST_RETRY_S))

    async def _see(self, kind: str, found: Json) -> None:
        if kind not in ("ADDED", "MODIFIED", "DELETED"):
            return
        pod = parsed(found)
        if not pod.member or not pod.worker:
            return
        if kind == "DELETED" or not pod.living:
            if pod.worker in self._pods and self._pods[pod.worker].uid == pod.uid:
                self._ended(pod.worker, pod.end or "its pod was deleted")
        else:
            self._keep(pod)
        async with self._changed:
            self._changed.notify_all()

    async def _list(self) -> str:
        """Compare with the API server's list. Returns the list's resource version."""
        async with self._changing:
            listed, version = await self._cluster.list(selector(self._pool))
            pods = {pod.worker: pod for found in listed if (pod := parsed(found)).member and pod.worker}
            for pod in pods.values():
                if pod.living:
                    if pod.worker not in self._pods:
                        log.info("worker adopted", worker=pod.worker, member=pod.member)
                    self._keep(pod)
            for worker in list(self._pods):
                if worker not in pods or not pods[worker].living:
                    end = pods[worker].end if worker in pods else ""
                    self._ended(worker, end or "its pod no longer exists")
            return version

    def _keep(self, pod: Pod) -> None:
        if pod.uid not in self._gone:
            before = self._pods.get(pod.worker)
            if pod.waits and (before is None or before.waits != pod.waits):
                log.warning("pod cannot start", worker=pod.worker, member=pod.member, reason=pod.waits)
            self._pods[pod.worker] = pod

    def _ended(self, worker: str, status: str) -> None:
        pod = self._pods.pop(worker, None)
        if pod is not None:
            self._gone[pod.uid] = None
            if self._on_exit is not None:
                self._on_exit(worker, status)

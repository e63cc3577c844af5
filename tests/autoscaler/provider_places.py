"""The environments of provider tests: in memory, this machine's processes, a Ray cluster, Kubernetes' API."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from tests.autoscaler.api_server import ApiServer, template
from tests.helpers.waiting import eventually
from turboserve.autoscaler.providers.base import (
    Health,
    LaunchError,
    OnExit,
    PoolProvider,
    ProviderWorker,
)
from turboserve.autoscaler.providers.kubernetes import KubernetesProvider
from turboserve.autoscaler.providers.kubernetes_cluster import KubernetesCluster
from turboserve.autoscaler.providers.local import LocalProvider, pool_id, worker_environment
from turboserve.autoscaler.providers.process import environment_of, pids
from turboserve.autoscaler.providers.ray import RayProvider
from turboserve.autoscaler.providers.ray_cluster import MemberNeeds, Needs, RayCluster
from turboserve.ids import new_id

PROGRAM = Path(__file__).with_name("plain_worker.py")
LIMIT_S = 60.0
NEEDS = MemberNeeds.alike(Needs(gpus=0, cpus=1, resources=(("worker", 1),)))


class MemoryProvider(PoolProvider):
    """Workers that are entries of a dictionary, which outlives the provider as a cluster does."""

    name: ClassVar[str] = "memory"

    def __init__(self, cluster: dict[str, ProviderWorker]) -> None:
        self._cluster = cluster
        self._known: set[str] = set()
        self._on_exit: OnExit | None = None
        self._task: asyncio.Task[None] | None = None

    def watch(self, on_exit: OnExit) -> None:
        self._on_exit = on_exit
        self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            for worker in sorted(self._known - self._cluster.keys()):
                self._known.discard(worker)
                assert self._on_exit is not None
                self._on_exit(worker, "its process no longer exists")

    async def adopt(self) -> list[ProviderWorker]:
        self._known |= self._cluster.keys()
        return list(self._cluster.values())

    async def reserve(self, member: str) -> None:
        pass

    async def launch(self, member: str, worker: str) -> ProviderWorker:
        if worker in self._cluster:
            return self._cluster[worker]
        if any(provider_worker.member == member for provider_worker in self._cluster.values()):
            raise LaunchError("occupied", field=member)
        self._cluster[worker] = ProviderWorker(member, worker)
        self._known.add(worker)
        return self._cluster[worker]

    async def ready(self, worker: str) -> bool:
        return worker in self._cluster

    async def drain(self, worker: str) -> None:
        pass

    async def release(self, member: str, worker: str | None, grace_s: float) -> None:
        self._cluster.pop(worker or "", None)

    async def health(self) -> Health:
        return Health(True)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Place:
    """An environment in which workers outlive their providers."""

    def __init__(self, kind: str, address: str = "", server: ApiServer | None = None) -> None:
        """`address` is the Ray cluster's, or the path of the kubeconfig of `server`."""
        self.kind, self.address, self.server = kind, address, server
        self.cluster: dict[str, ProviderWorker] = {}
        self.pool = pool_id("test", new_id("scope"))
        self.providers: list[tuple[PoolProvider, list[tuple[str, str]]]] = []

    def provider(self, mode: str = "good") -> tuple[PoolProvider, list[tuple[str, str]]]:
        """Create a provider as after a restart of the autoscaler.

        Returns it and the exits that it reports.
        """
        provider: PoolProvider
        if self.kind == "memory":
            provider = MemoryProvider(self.cluster)
        elif self.kind == "ray":
            command = [sys.executable, "-I", "-S", str(PROGRAM), mode]
            cluster = RayCluster(self.address, self.pool, call_s=LIMIT_S)
            provider = RayProvider(self.pool, cluster, command, {}, NEEDS, launch_s=LIMIT_S)
        elif self.kind == "kubernetes":
            # The first call imports the official client, for which a busy machine takes many seconds.
            pods = KubernetesCluster("workers", Path(self.address), call_s=LIMIT_S)
            provider = KubernetesProvider(self.pool, pods, template(PROGRAM, mode))
        else:
            command = [sys.executable, "-I", "-S", str(PROGRAM), mode]
            provider = LocalProvider(self.pool, command, worker_environment(1, None, None))
        exits: list[tuple[str, str]] = []
        provider.watch(lambda worker, status: exits.append((worker, status)))
        self.providers.append((provider, exits))
        return provider, exits

    async def kill(self, provider_worker: ProviderWorker) -> None:
        """Kill the worker without the provider, as soon as its process runs."""
        if self.kind == "ray":
            os.kill(process_of(provider_worker.worker), signal.SIGKILL)
        elif (server := self.server) is not None:
            await eventually(lambda: server.process_of(provider_worker.worker))
            server.kill(provider_worker.worker)
        elif provider_worker.pid is not None:
            os.kill(provider_worker.pid, signal.SIGKILL)
        else:
            del self.cluster[provider_worker.worker]


def process_of(worker: str) -> int:
    """Return the process id of a worker that an actor or a pod holds."""
    return processes()[worker]


def processes() -> dict[str, int]:
    """Return the process ids of all workers on this machine, by worker."""
    return {
        found["TURBOSERVE_WORKER_ID"]: pid
        for pid in pids()
        if {"TURBOSERVE_WORKER_ID", "TURBOSERVE_HEALTH_PORT"} <= (found := environment_of(pid)).keys()
    }


def raylets(node: Any) -> set[int]:
    return {info.process.pid for info in node.all_processes["raylet"]}


def started(start: Callable[[], Any]) -> Any:
    """Retry the start: Ray gives a node 30 s, which is not enough on a busy machine."""
    for _ in range(4):
        try:
            return start()
        except Exception as error:
            print(f"a node of Ray did not start: {error}")
    return start()


async def clear(place: Place) -> None:
    sweeper, _ = place.provider()
    for provider_worker in await sweeper.adopt():
        await sweeper.release(provider_worker.member, provider_worker.worker, 0.1)
    for provider, _ in place.providers:
        await provider.close()


async def spawn(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, **options)

    return await asyncio.to_thread(start)

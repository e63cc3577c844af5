"""A switch of offers on Ray and Kubernetes: the pool's core with the providers, on a place for one worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import turboserve.autoscaler.providers.kubernetes as kubernetes_module
import turboserve.autoscaler.providers.ray as ray_module
from tests.autoscaler.api_server import ApiServer, api_server, kubeconfig, template
from tests.autoscaler.autoscaler_bench import Bench, row
from tests.autoscaler.provider_places import LIMIT_S, PROGRAM
from tests.autoscaler.test_provider_ray import Cluster
from turboserve.autoscaler.executor import Executor
from turboserve.autoscaler.messages import (
    Command,
    Done,
    Drain,
    Event,
    Exited,
    Failed,
    Launch,
    ListProviderWorkers,
    Release,
    Reserve,
    SizesWanted,
    Tick,
)
from turboserve.autoscaler.pool_file import PoolFile
from turboserve.autoscaler.providers.base import PoolProvider
from turboserve.autoscaler.providers.kubernetes import KubernetesProvider
from turboserve.autoscaler.providers.kubernetes_cluster import KubernetesCluster
from turboserve.autoscaler.providers.member_kinds import member_needs, member_pod
from turboserve.autoscaler.providers.ray import RayProvider
from turboserve.autoscaler.providers.ray_cluster import RayCluster
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.bus import Bus
from turboserve.contracts.pool import PoolMemberPhase
from turboserve.contracts.workers import WorkerPhase

FILE = """
offers = [{ name = "a", kind = "one", model = "m" }, { name = "b", kind = "one", model = "n" }]
[kinds.one]
price = 1.0
most = 2
gpus = 2
cpus = 3
node_selector = { gpu = "h200" }
limits = { "nvidia.com/gpu" = "2" }
"""


def settings() -> AutoscalerSettings:
    return AutoscalerSettings(pool_file=PoolFile.parse(FILE), pool_name="local")


class ProvidedPool(Bench):
    """The pool's core. A provider carries its commands out; the store's answers come from the test."""

    def __init__(self, provider: PoolProvider) -> None:
        super().__init__(0)
        self._executor = Executor(cast(Bus, SimpleNamespace(call=None)), provider, 1.0)
        provider.watch(lambda worker, status: self.feed(Exited(worker, status)))
        self.feed(SizesWanted({"a": 1, "b": 0}, "test"))

    async def carry_out(self, kind: type[Command]) -> Event:
        answer = await self._executor.run(self.take(kind))
        self.feed(answer)
        return answer

    async def begin(self) -> Event:
        """Reserve and launch a worker, as far as each succeeds."""
        answer: Event = Done(0)
        for kind in (Reserve, Launch):
            if isinstance(answer, Done) and self.has(kind):
                answer = await self.carry_out(kind)
        return answer

    async def switch(self, taken: Callable[[bool], None]) -> str:
        """Switch the worker of `a` to `b`. Returns the id of the worker of `b`.

        `taken(True)`: another tenant's work takes the place when the first worker has ended. `taken(False)`:
        it has gone.
        """
        await self.carry_out(ListProviderWorkers)
        assert isinstance(await self.begin(), Done)
        [first] = self.pool.workers()
        self.report(first)
        self.feed(SizesWanted({"a": 0, "b": 1}, "a switch", (("a", "b"),)))
        self.do(Drain)
        assert not self.has(Reserve)
        for _ in range(2):
            self.list_workers(row(first, WorkerPhase.DRAINING))
        assert isinstance(await self.carry_out(Release), Done)
        taken(True)
        assert isinstance(await self.begin(), Failed)
        taken(False)
        self.feed(Tick(), after=60.0)
        assert isinstance(await self.begin(), Done)
        [(name, member)] = self.pool.members.items()
        assert (name, member.phase) == ("local-b-0", PoolMemberPhase.LAUNCHING)
        assert member.worker is not None
        assert member.worker != first
        return member.worker


async def test_on_ray_the_new_worker_takes_the_reservation_that_the_first_one_gave_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, room = Cluster(), [1]
    bundles, variables = dict[str, Mapping[str, float]](), dict[str, Mapping[str, str]]()

    def reserve(name: str, bundle: Mapping[str, float], wait_s: float) -> bool:
        if name not in cluster.groups and len(cluster.groups) >= room[0]:
            return False
        cluster.groups.add(name)
        bundles[name] = bundle
        return True

    def make(ray: Any, bundle: Mapping[str, float], group: str, name: str, namespace: str) -> Any:
        def begin(command: object, environment: Mapping[str, str], inherited: object) -> Callable[[], None]:
            variables[name] = environment
            member, _, worker = name.partition("/")
            return lambda: cluster.start(member, worker)

        return SimpleNamespace(name=name, start=SimpleNamespace(remote=begin))

    for name, fake in (
        ("reserve_group", reserve),
        ("make_host", make),
        ("remove_group", cluster.remove_group),
        ("remove_groups_besides", cluster.remove_groups_besides),
    ):
        monkeypatch.setattr(ray_module, name, fake)
    monkeypatch.setattr(RayProvider, "_keep", lambda *_: None)
    provider = RayProvider("pool", cast(RayCluster, cluster), ["worker"], {}, member_needs(settings()))
    worker = await ProvidedPool(provider).switch(lambda on: room.__setitem__(0, int(not on)))
    assert cluster.groups == {"pool/local-b-0"}
    assert cluster.living == {f"local-b-0/{worker}"}
    assert variables[f"local-b-0/{worker}"]["TURBOSERVE_MODEL"] == "n"
    assert bundles["pool/local-b-0"] == bundles["pool/local-a-0"] == {"CPU": 3, "GPU": 2}


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    monkeypatch.setattr(kubernetes_module, "STUCK_S", LIMIT_S)
    async with api_server() as server:
        yield server


async def test_on_kubernetes_the_new_pod_has_the_place_and_the_nodes_of_the_first_one(
    server: ApiServer, tmp_path: Path
) -> None:
    read, server.quota = settings(), 1
    pods = KubernetesCluster("workers", kubeconfig(tmp_path, server.url), LIMIT_S)
    provider = KubernetesProvider(
        "local", pods, template(PROGRAM), of_member=lambda member: member_pod(read, member)
    )
    try:
        worker = await ProvidedPool(provider).switch(lambda on: setattr(server, "quota", int(not on)))
        [pod] = server.pods.values()
        assert pod["metadata"]["labels"]["turboserve.io/member"] == "local-b-0"
        assert pod["spec"]["nodeSelector"] == {"gpu": "h200"}
        container = pod["spec"]["containers"][0]
        assert container["resources"]["requests"] == {"nvidia.com/gpu": "2"}
        assert {"name": "TURBOSERVE_MODEL", "value": "n"} in container["env"]
        await provider.release("local-b-0", worker, 5.0)
    finally:
        await provider.close()

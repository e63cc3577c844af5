"""The Ray provider of a leader that was suspended, beside its successor's. The cluster is in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

import turboserve.autoscaler.providers.ray as provider_module
from turboserve.autoscaler.providers.base import Health, LaunchError
from turboserve.autoscaler.providers.ray import RayProvider
from turboserve.autoscaler.providers.ray_cluster import MemberNeeds, Needs, RayCluster

SPACE = "turboserve-pool"


class ActorError(Exception):
    """Raised for an actor that has ended."""


class Cluster:
    """Actors and placement groups by name. It lists an ended actor for a moment longer."""

    def __init__(self) -> None:
        self.listed: list[str] = []
        self.living: set[str] = set()
        self.groups: set[str] = set()
        self.meanwhile: Callable[[], None] = lambda: None
        """What happens while this process waits for a worker's end."""
        self.namespace = SPACE
        self.exceptions = SimpleNamespace(RayActorError=ActorError, GetTimeoutError=TimeoutError)
        self.util = SimpleNamespace(
            list_named_actors=lambda all_namespaces: [
                {"name": name, "namespace": SPACE} for name in self.listed
            ]
        )

    def start(self, member: str, worker: str) -> None:
        self.listed.append(f"{member}/{worker}")
        self.living.add(f"{member}/{worker}")
        self.groups.add(f"pool/{member}")

    async def call(self, work: Callable[[Any], Any], longer_s: float = 0.0, what: str = "") -> Any:
        return work(self)

    def get_actor(self, name: str, namespace: str) -> Any:
        if name not in self.living:
            raise ValueError(name)

        def method(answer: Callable[[], Any]) -> Any:
            return SimpleNamespace(remote=lambda *_: answer)

        def stop() -> bool:
            self.meanwhile()
            return True

        return SimpleNamespace(name=name, stop=method(stop), alive=method(lambda: name in self.living))

    def get(self, answer: Callable[[], Any], timeout: float) -> Any:
        return answer()

    def kill(self, actor: Any, no_restart: bool) -> None:
        self.living.discard(actor.name)

    def remove_group(self, name: str) -> None:
        self.groups.discard(name)

    def remove_groups_besides(self, prefix: str, used: set[str]) -> None:
        self.groups &= used


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    for name in ("remove_group", "remove_groups_besides"):
        monkeypatch.setattr(provider_module, name, getattr(cluster, name))
    return cluster


@pytest.fixture
def provider(cluster: Cluster) -> RayProvider:
    return RayProvider("pool", cast(RayCluster, cluster), ["worker"], {}, MemberNeeds.alike(Needs()))


async def test_a_release_leaves_the_reservation_to_another_worker_of_the_member(
    cluster: Cluster, provider: RayProvider
) -> None:
    """Incident: a leader that was suspended within a release ended the worker of its successor."""
    cluster.start("local-0", "wrk_a")

    def succeed() -> None:
        cluster.living.discard("local-0/wrk_a")
        cluster.listed.remove("local-0/wrk_a")
        cluster.start("local-0", "wrk_b")

    cluster.meanwhile = succeed
    await provider.release("local-0", "wrk_a", 1.0)
    assert cluster.groups == {"pool/local-0"}
    assert cluster.living == {"local-0/wrk_b"}
    await provider.release("local-0", None, 1.0)
    assert cluster.groups == {"pool/local-0"}


async def test_a_release_gives_the_reservation_back_though_the_ended_actor_is_listed(
    cluster: Cluster, provider: RayProvider
) -> None:
    cluster.start("local-0", "wrk_a")
    await provider.release("local-0", "wrk_a", 1.0)
    assert "local-0/wrk_a" in cluster.listed
    assert cluster.groups == set()


async def test_the_first_listing_keeps_reservations_of_workers_that_came_meanwhile(
    cluster: Cluster, provider: RayProvider
) -> None:
    cluster.groups.add("pool/local-7")
    names = provider._names

    async def listed() -> list[str]:
        found = await names()
        cluster.start("local-1", "wrk_b")
        return found

    provider._names = listed  # type: ignore[method-assign]
    assert await provider.adopt() == []
    assert cluster.groups == {"pool/local-1"}


async def test_a_member_that_has_another_autoscalers_actor_is_refused_at_once(
    cluster: Cluster, provider: RayProvider
) -> None:
    cluster.start("local-0", "wrk_a")
    with pytest.raises(LaunchError, match="still has wrk_a"):
        await provider.launch("local-0", "wrk_b")
    assert cluster.living == {"local-0/wrk_a"}


async def test_each_member_gets_the_resources_and_the_variables_of_its_kind(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved = dict[str, Mapping[str, float]]()
    made, started = dict[str, Mapping[str, float]](), dict[str, Mapping[str, str]]()

    def reserve(name: str, bundle: Mapping[str, float], wait_s: float) -> bool:
        reserved[name] = bundle
        return True

    def make(ray: Any, bundle: Mapping[str, float], group: str, name: str, namespace: str) -> Any:
        made[name] = bundle
        begin = SimpleNamespace(
            remote=lambda command, environment, inherited: started.update({name: environment})
        )
        return SimpleNamespace(name=name, start=begin)

    monkeypatch.setattr(provider_module, "reserve_group", reserve)
    monkeypatch.setattr(provider_module, "make_host", make)
    monkeypatch.setattr(cluster, "get", lambda answer, timeout: None)
    monkeypatch.setattr(RayProvider, "_keep", lambda *_: None)
    kinds = {"local-wide-0": Needs(2, 3), "local-tiny-0": Needs(0, 1)}
    needs = MemberNeeds(kinds.__getitem__, kinds.values(), lambda member: {"TURBOSERVE_MODEL": member})
    provider = RayProvider("pool", cast(RayCluster, cluster), ["worker"], {"TURBOSERVE_MODEL": "no"}, needs)
    for member in kinds:
        await provider.launch(member, "wrk_a")
    assert list(reserved.values()) == list(made.values()) == [{"CPU": 3, "GPU": 2}, {"CPU": 1}]
    assert [found["TURBOSERVE_MODEL"] for found in started.values()] == list(kinds)
    monkeypatch.setattr(cluster, "cluster_resources", lambda: {"CPU": 3.0, "GPU": 1.0}, raising=False)
    assert await provider.health() == Health(False, "the cluster has no node with GPU")

"""The contract of every pool provider, tested in memory, on real processes, and on Kubernetes' API."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

import turboserve.autoscaler.providers.kubernetes
import turboserve.autoscaler.providers.ray
from tests.autoscaler.api_server import api_server, kubeconfig
from tests.autoscaler.provider_places import (
    LIMIT_S,
    NEEDS,
    Place,
    clear,
    process_of,
    processes,
    raylets,
    started,
)
from tests.helpers.waiting import eventually
from turboserve import telemetry
from turboserve.autoscaler.providers.base import (
    LaunchError,
    NoResourcesError,
)
from turboserve.autoscaler.providers.process import environment_of
from turboserve.autoscaler.providers.ray import RayProvider
from turboserve.autoscaler.providers.ray_cluster import MemberNeeds, Needs, RayCluster
from turboserve.ids import new_id


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[Any]:
    """A Ray cluster of a head and two nodes for one worker each, on loopback, without dashboard."""
    # Ray sets additional variables and a signal handler of its own.
    terminated = signal.getsignal(signal.SIGTERM)
    # Everything is on loopback, as Ray does by itself if it expects a firewall.
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with mock.patch.dict(os.environ, own):
        yield from _ray_nodes()
    signal.signal(signal.SIGTERM, terminated)


def _ray_nodes() -> Iterator[Any]:
    pytest.importorskip("ray", reason="ray is not installed: its provider was not tested")
    import ray
    from ray.cluster_utils import Cluster

    small = {
        "include_dashboard": False,
        "include_log_monitor": False,
        "node_ip_address": "127.0.0.1",
        "object_store_memory": 80_000_000,
    }
    cluster = started(lambda: Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small}))
    cluster.nodes_of_workers = [
        started(lambda: cluster.add_node(num_cpus=1, resources={"worker": 1}, **small)) for _ in range(2)
    ]
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limits, because a busy machine is only slow."""
    for name in ("PROBE_S", "RESERVE_S"):
        monkeypatch.setattr(turboserve.autoscaler.providers.ray, name, LIMIT_S)
    monkeypatch.setattr(turboserve.autoscaler.providers.kubernetes, "STUCK_S", LIMIT_S)


@pytest.fixture(params=["memory", "local", "ray", "kubernetes"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    if request.param == "kubernetes":
        async with api_server() as server:
            place = Place("kubernetes", str(kubeconfig(tmp_path, server.url)), server)
            yield place
            await clear(place)
        return
    address = request.getfixturevalue("ray_nodes").address if request.param == "ray" else ""
    place = Place(request.param, address)
    yield place
    await clear(place)


async def test_a_worker_from_reservation_to_release(place: Place) -> None:
    provider, exits = place.provider()
    assert (await provider.health()).ok
    assert not await provider.ready("wrk_a")
    await provider.reserve("test-0")
    await provider.reserve("test-0")
    provider_worker = await provider.launch("test-0", "wrk_a")
    assert (provider_worker.member, provider_worker.worker) == ("test-0", "wrk_a")
    await eventually(lambda: provider.ready("wrk_a"))
    assert await provider.adopt() == [provider_worker]
    await provider.drain("wrk_a")
    await provider.drain("wrk_a")
    await provider.release("test-0", "wrk_a", 5.0)
    assert await provider.adopt() == []
    assert not await provider.ready("wrk_a")
    await eventually(lambda: [worker for worker, _ in exits] == ["wrk_a"])
    await provider.release("test-0", "wrk_a", 5.0)
    await provider.release("test-0", None, 5.0)
    assert len(exits) == 1


async def test_one_worker_per_slot(place: Place) -> None:
    provider, _ = place.provider()
    provider_worker = await provider.launch("test-0", "wrk_a")
    assert await provider.launch("test-0", "wrk_a") == provider_worker
    with pytest.raises(LaunchError):
        await provider.launch("test-0", "wrk_b")
    assert await provider.adopt() == [provider_worker]


async def test_one_worker_per_member_of_two_autoscalers(place: Place) -> None:
    """A provider that has listed nothing since another one launched, such as that of a suspended leader."""
    (first, _), (second, _) = place.provider(), place.provider()
    await second.adopt()
    await first.reserve("test-0")
    provider_worker = await first.launch("test-0", "wrk_a")
    with pytest.raises(LaunchError):
        await second.launch("test-0", "wrk_b")
    assert [(one.member, one.worker) for one in await second.adopt()] == [("test-0", "wrk_a")]
    await second.release("test-0", "wrk_a", 5.0)
    await first.release("test-0", "wrk_a", 5.0)
    assert await first.adopt() == []
    assert provider_worker.worker == "wrk_a"


async def test_a_death_is_reported_once_and_the_member_is_free(place: Place) -> None:
    provider, exits = place.provider()
    provider_worker = await provider.launch("test-0", "wrk_a")
    await place.kill(provider_worker)
    await eventually(lambda: len(exits) == 1)
    assert exits[0][0] == "wrk_a"
    assert await provider.adopt() == []
    provider_worker = await provider.launch("test-0", "wrk_b")
    await eventually(lambda: provider.ready("wrk_b"))
    await place.kill(provider_worker)
    await eventually(lambda: "wrk_b" in [worker for worker, _ in exits])
    # A second report of the first death would be among them by now.
    assert [worker for worker, _ in exits] == ["wrk_a", "wrk_b"]


async def test_an_additional_worker_is_released_under_another_member(place: Place) -> None:
    """The pool gives a worker that it did not expect in a member a name of its own."""
    provider, exits = place.provider()
    await provider.launch("test-0", "wrk_a")
    await eventually(lambda: provider.ready("wrk_a"))
    await provider.release("test-extra-wrk_a", "wrk_a", 5.0)
    assert await provider.adopt() == []
    await eventually(lambda: [worker for worker, _ in exits] == ["wrk_a"])


async def test_the_next_provider_finds_what_the_last_one_started(place: Place) -> None:
    """The first provider ends without closing, as after kill -9."""
    first, _ = place.provider()
    provider_workers = [await first.launch(f"test-{n}", f"wrk_{n}") for n in range(2)]
    second, exits = place.provider()
    found = await second.adopt()
    assert sorted(m.worker for m in found) == ["wrk_0", "wrk_1"]
    assert {(m.member, m.worker, m.pid) for m in found} == {
        (m.member, m.worker, m.pid) for m in provider_workers
    }
    with pytest.raises(LaunchError):
        await second.launch("test-0", "wrk_9")
    await eventually(lambda: second.ready("wrk_0"))
    await place.kill(provider_workers[1])
    await eventually(lambda: [worker for worker, _ in exits] == ["wrk_1"])
    await second.release("test-0", "wrk_0", 5.0)
    await eventually(lambda: [worker for worker, _ in exits] == ["wrk_1", "wrk_0"])


@pytest.mark.parametrize("place", ["local", "ray", "kubernetes"], indirect=True)
async def test_a_worker_continues_the_span_within_which_it_is_launched(place: Place) -> None:
    provider, _ = place.provider()
    span = SpanContext(0xA1, 0xB2, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    telemetry.switch_tracing(on=True)
    try:
        with trace.use_span(NonRecordingSpan(span)):
            await provider.launch("test-0", "wrk_traced")
        await provider.launch("test-1", "wrk_untraced")
    finally:
        telemetry.switch_tracing(on=False)
    # A pod runs some time after it was created.
    await eventually(lambda: {"wrk_traced", "wrk_untraced"} <= processes().keys())
    found = environment_of(process_of("wrk_traced"))[telemetry.TRACEPARENT]
    assert found == f"00-{0xA1:032x}-{0xB2:016x}-01"
    assert telemetry.TRACEPARENT not in environment_of(process_of("wrk_untraced"))


# Only Ray


async def test_ray_what_no_node_has_room_for_is_asked_for_and_refused(
    ray_nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reservation stays with the cluster, so that its own autoscaler may add a node."""
    place = Place("ray", ray_nodes.address)
    provider, _ = place.provider()
    try:
        for member in ("test-0", "test-1"):
            await provider.launch(member, f"wrk_{member}")
        with monkeypatch.context() as hasty:
            hasty.setattr(turboserve.autoscaler.providers.ray, "RESERVE_S", 3.0)
            with pytest.raises(NoResourcesError, match="worker"):
                await provider.reserve("test-2")
        cluster = RayCluster(ray_nodes.address, place.pool, call_s=LIMIT_S)
        greedy = RayProvider(place.pool, cluster, [], {}, MemberNeeds.alike(Needs(gpus=8)))
        health = await greedy.health()
        assert not health.ok
        assert "GPU" in str(health.reason)
        assert (await provider.health()).ok
        # The waiting reservation takes the room that becomes free.
        await provider.release("test-0", "wrk_test-0", 5.0)
        await provider.reserve("test-2")
        # The autoscaler is killed now. The next one returns reservations without a worker.
        after, _ = place.provider()
        assert [provider_worker.member for provider_worker in await after.adopt()] == ["test-1"]
        await after.reserve("test-3")
        await after.release("test-3", None, 1.0)
    finally:
        await clear(place)


async def test_ray_a_command_that_is_not_there_leaves_nothing_behind(ray_nodes: Any) -> None:
    place = Place("ray", ray_nodes.address)
    sweeper, exits = place.provider()
    cluster = RayCluster(ray_nodes.address, place.pool, call_s=LIMIT_S)
    provider = RayProvider(place.pool, cluster, ["/nowhere/worker"], {}, NEEDS, launch_s=LIMIT_S)
    with pytest.raises(LaunchError, match="/nowhere/worker"):
        await provider.launch("test-0", "wrk_a")
    assert await provider.adopt() == await sweeper.adopt() == []
    await provider.release("test-0", "wrk_a", 1.0)
    assert exits == []


async def test_ray_a_node_that_dies_takes_its_worker_and_the_slot_goes_elsewhere(ray_nodes: Any) -> None:
    place = Place("ray", ray_nodes.address)
    provider, exits = place.provider()
    # The process is looked for among all of the machine, where other tests have workers, too.
    first, second = new_id("wrk"), new_id("wrk")
    try:
        await provider.launch("test-0", first)
        pid = process_of(first)
        ancestors = {parent.pid for parent in psutil.Process(pid).parents()}
        [node] = [n for n in ray_nodes.nodes_of_workers if ancestors & raylets(n)]
        ray_nodes.remove_node(node, allow_graceful=False)
        ray_nodes.nodes_of_workers.remove(node)
        await eventually(lambda: [worker for worker, _ in exits] == [first])
        assert await provider.adopt() == []
        # The worker ended with its actor, whatever else the node still runs.
        await eventually(lambda: not environment_of(pid))
        await provider.launch("test-0", second)
        await eventually(lambda: provider.ready(second))
    finally:
        await clear(place)

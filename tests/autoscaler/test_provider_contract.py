"""What every pool provider has to keep, played on a provider in memory and on real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from turboserve.autoscaler.providers.base import (
    Health,
    LaunchError,
    Member,
    NoResourcesError,
    OnExit,
    PoolProvider,
)
from turboserve.autoscaler.providers.external import ExternalProvider
from turboserve.autoscaler.providers.local import LocalProvider, pool_id, worker_environment
from turboserve.autoscaler.providers.process import environment_of, pids
from turboserve.autoscaler.providers.ray import RayProvider
from turboserve.autoscaler.providers.ray_cluster import Needs, RayCluster, node_environment
from turboserve.ids import new_id

PROGRAM = Path(__file__).with_name("plain_worker.py")
LIMIT_S = 60.0
NEEDS = Needs(gpus=0, cpus=1, resources=(("worker", 1),))


class MemoryProvider(PoolProvider):
    """Workers that are entries of a dictionary, which outlives the provider as a cluster does."""

    name: ClassVar[str] = "memory"

    def __init__(self, cluster: dict[str, Member]) -> None:
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
                self._on_exit(worker, "it is not there any more")

    async def adopt(self) -> list[Member]:
        self._known |= self._cluster.keys()
        return list(self._cluster.values())

    async def reserve(self, slot: str) -> None:
        pass

    async def launch(self, slot: str, worker: str) -> Member:
        if worker in self._cluster:
            return self._cluster[worker]
        if any(member.slot == slot for member in self._cluster.values()):
            raise LaunchError("occupied", field=slot)
        self._cluster[worker] = Member(slot, worker)
        self._known.add(worker)
        return self._cluster[worker]

    async def ready(self, worker: str) -> bool:
        return worker in self._cluster

    async def drain(self, worker: str) -> None:
        pass

    async def release(self, slot: str, worker: str | None, grace_s: float) -> None:
        self._cluster.pop(worker or "", None)

    async def health(self) -> Health:
        return Health(True)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Place:
    """Somewhere that providers come and go, and workers stay."""

    def __init__(self, kind: str, address: str = "") -> None:
        self.kind, self.address = kind, address
        self.cluster: dict[str, Member] = {}
        self.pool = pool_id("test", new_id("scope"))
        self.providers: list[tuple[PoolProvider, list[tuple[str, str]]]] = []

    def provider(self, mode: str = "good") -> tuple[PoolProvider, list[tuple[str, str]]]:
        """A new provider as after a restart of the autoscaler, and the exits it tells."""
        provider: PoolProvider
        if self.kind == "memory":
            provider = MemoryProvider(self.cluster)
        elif self.kind == "ray":
            command = [sys.executable, "-I", "-S", str(PROGRAM), mode]
            cluster = RayCluster(self.address, self.pool, call_s=LIMIT_S)
            provider = RayProvider(self.pool, cluster, command, {}, NEEDS, launch_s=LIMIT_S)
        else:
            command = [sys.executable, "-I", "-S", str(PROGRAM), mode]
            provider = LocalProvider(self.pool, command, worker_environment(1, None, None))
        exits: list[tuple[str, str]] = []
        provider.watch(lambda worker, status: exits.append((worker, status)))
        self.providers.append((provider, exits))
        return provider, exits

    def kill(self, member: Member) -> None:
        """The worker dies by itself."""
        if self.kind == "ray":
            os.kill(process_of(member.worker), signal.SIGKILL)
        elif member.pid is not None:
            os.kill(member.pid, signal.SIGKILL)
        else:
            del self.cluster[member.worker]


def process_of(worker: str) -> int:
    """The process id of a worker that some actor holds."""
    for pid in pids():
        environment = environment_of(pid)
        if environment.get("TURBOSERVE_WORKER_ID") == worker and "TURBOSERVE_HEALTH_PORT" in environment:
            return pid
    raise AssertionError(f"no process of {worker}")


def raylets(node: Any) -> set[int]:
    return {info.process.pid for info in node.all_processes["raylet"]}


def started(start: Callable[[], Any]) -> Any:
    """Ray gives a node 30 s to start, which is not enough on a machine that is busy with something else."""
    for _ in range(4):
        try:
            return start()
        except Exception as error:
            print(f"a node of Ray did not start: {error}")
    return start()


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[Any]:
    """A Ray cluster of a head and two nodes for one worker each, on loopback, without dashboard."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Everything on loopback, as Ray does by itself where it expects a firewall.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
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


@pytest.fixture(params=["memory", "local", "ray"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    address = request.getfixturevalue("ray_nodes").address if request.param == "ray" else ""
    place = Place(request.param, address)
    yield place
    await clear(place)


@pytest.fixture
async def machine() -> AsyncIterator[Place]:
    """Real processes, for what only they do."""
    place = Place("local")
    yield place
    await clear(place)


async def clear(place: Place) -> None:
    sweeper, _ = place.provider()
    for member in await sweeper.adopt():
        await sweeper.release(member.slot, member.worker, 0.1)
    for provider, _ in place.providers:
        await provider.close()


async def spawn(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    return await asyncio.to_thread(subprocess.Popen, command, **options)


async def eventually(condition: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        assert asyncio.get_running_loop().time() < deadline, "it never came true"
        await asyncio.sleep(0.02)


async def test_a_worker_from_reservation_to_release(place: Place) -> None:
    provider, exits = place.provider()
    assert (await provider.health()).ok
    assert not await provider.ready("wrk_a")
    await provider.reserve("test-0")
    await provider.reserve("test-0")
    member = await provider.launch("test-0", "wrk_a")
    assert (member.slot, member.worker) == ("test-0", "wrk_a")
    await eventually(lambda: provider.ready("wrk_a"))
    assert await provider.adopt() == [member]
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
    member = await provider.launch("test-0", "wrk_a")
    assert await provider.launch("test-0", "wrk_a") == member
    with pytest.raises(LaunchError):
        await provider.launch("test-0", "wrk_b")
    assert await provider.adopt() == [member]


async def test_a_death_is_told_once_and_the_slot_is_free(place: Place) -> None:
    provider, exits = place.provider()
    member = await provider.launch("test-0", "wrk_a")
    place.kill(member)
    await eventually(lambda: len(exits) == 1)
    assert exits[0][0] == "wrk_a"
    assert await provider.adopt() == []
    await provider.launch("test-0", "wrk_b")
    await asyncio.sleep(0.2)
    assert len(exits) == 1


async def test_the_next_provider_finds_what_the_last_one_started(place: Place) -> None:
    """Without a goodbye of the first one, as after kill -9."""
    first, _ = place.provider()
    members = [await first.launch(f"test-{n}", f"wrk_{n}") for n in range(2)]
    second, exits = place.provider()
    found = await second.adopt()
    assert sorted(m.worker for m in found) == ["wrk_0", "wrk_1"]
    assert {(m.slot, m.worker, m.pid) for m in found} == {(m.slot, m.worker, m.pid) for m in members}
    with pytest.raises(LaunchError):
        await second.launch("test-0", "wrk_9")
    await eventually(lambda: second.ready("wrk_0"))
    place.kill(members[1])
    await eventually(lambda: [worker for worker, _ in exits] == ["wrk_1"])
    await second.release("test-0", "wrk_0", 5.0)
    await eventually(lambda: [worker for worker, _ in exits] == ["wrk_1", "wrk_0"])


# Only Ray


async def test_ray_what_no_node_has_room_for_is_asked_for_and_refused(ray_nodes: Any) -> None:
    """The reservation stays with the cluster, so that its own autoscaler may add a node."""
    place = Place("ray", ray_nodes.address)
    provider, _ = place.provider()
    try:
        for slot in ("test-0", "test-1"):
            await provider.launch(slot, f"wrk_{slot}")
        with pytest.raises(NoResourcesError, match="worker"):
            await provider.reserve("test-2")
        greedy = RayProvider(place.pool, RayCluster(ray_nodes.address, place.pool), [], {}, Needs(gpus=8))
        health = await greedy.health()
        assert not health.ok
        assert "GPU" in str(health.reason)
        assert (await provider.health()).ok
        # Room that comes free is taken by the reservation that waits.
        await provider.release("test-0", "wrk_test-0", 5.0)
        await provider.reserve("test-2")
        # The autoscaler is killed now: the next one gives back what nobody lives in.
        after, _ = place.provider()
        assert [member.slot for member in await after.adopt()] == ["test-1"]
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
    try:
        await provider.launch("test-0", "wrk_a")
        pid = process_of("wrk_a")
        ancestors = {parent.pid for parent in psutil.Process(pid).parents()}
        [node] = [n for n in ray_nodes.nodes_of_workers if ancestors & raylets(n)]
        ray_nodes.remove_node(node, allow_graceful=False)
        ray_nodes.nodes_of_workers.remove(node)
        await eventually(lambda: [worker for worker, _ in exits] == ["wrk_a"])
        assert await provider.adopt() == []
        # Whatever the node still runs, its worker is not among it: it went with the actor.
        await eventually(lambda: not environment_of(pid))
        await provider.launch("test-0", "wrk_b")
        await eventually(lambda: provider.ready("wrk_b"))
    finally:
        await clear(place)


# Only real processes


async def test_exit_statuses_are_said_in_words(machine: Place) -> None:
    provider, exits = machine.provider("crash")
    await provider.launch("test-0", "wrk_a")
    await eventually(lambda: exits == [("wrk_a", "its process ended with status 3")])
    good, good_exits = machine.provider()
    member = await good.launch("test-0", "wrk_b")
    machine.kill(member)
    await eventually(lambda: good_exits == [("wrk_b", "its process was ended by SIGKILL")])


async def test_who_does_not_listen_is_killed(machine: Place) -> None:
    provider, exits = machine.provider("deaf")
    await provider.launch("test-0", "wrk_a")
    await eventually(lambda: provider.ready("wrk_a"))
    await provider.release("test-0", "wrk_a", 0.3)
    assert exits == [("wrk_a", "its process was ended by SIGKILL")]


async def test_a_stopped_process_is_ended(machine: Place) -> None:
    provider, exits = machine.provider()
    member = await provider.launch("test-0", "wrk_a")
    assert member.pid is not None
    os.kill(member.pid, signal.SIGSTOP)
    await provider.release("test-0", "wrk_a", 0.3)
    assert len(exits) == 1


async def test_a_probe_that_fails_is_not_ready(machine: Place) -> None:
    provider, _ = machine.provider("never")
    await provider.launch("test-0", "wrk_a")
    await asyncio.sleep(0.5)
    assert not await provider.ready("wrk_a")


async def test_a_command_that_is_not_there(machine: Place) -> None:
    provider = LocalProvider("p", ["/nowhere/worker"], {})
    with pytest.raises(LaunchError, match="/nowhere/worker"):
        await provider.launch("test-0", "wrk_a")
    assert await provider.adopt() == []


async def test_pools_do_not_see_each_other(machine: Place) -> None:
    provider, _ = machine.provider()
    await provider.launch("test-0", "wrk_a")
    stranger = LocalProvider(pool_id("test", "another broker"), ["x"], {})
    assert await stranger.adopt() == []


async def test_children_of_a_worker_are_not_workers(machine: Place) -> None:
    """They have its environment."""
    provider, _ = machine.provider()
    member = await provider.launch("test-0", "wrk_a")
    assert member.pid is not None
    script = "import time; time.sleep(30)"
    environment = {**os.environ, "TURBOSERVE_POOL_ID": machine.pool, "TURBOSERVE_POOL_SLOT": "test-7"}
    environment["TURBOSERVE_WORKER_ID"] = "wrk_child"
    child = await spawn([sys.executable, "-I", "-S", "-c", script], env=environment)
    try:
        await asyncio.sleep(0.2)
        assert [m.worker for m in await provider.adopt()] == ["wrk_a"]
    finally:
        child.kill()
        child.wait()


async def test_a_worker_outlives_the_process_that_started_it(machine: Place) -> None:
    """kill -9 of the autoscaler: its workers go on, and the next one finds them."""
    script = f"""
import asyncio, sys
from turboserve.autoscaler.providers.local import LocalProvider, worker_environment
async def main():
    provider = LocalProvider({machine.pool!r}, [sys.executable, "-I", "-S", {str(PROGRAM)!r}],
                             worker_environment(1, None, None))
    provider.watch(lambda *_: None)
    await provider.launch("test-0", "wrk_a")
    print("started", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = await spawn([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert await asyncio.to_thread(parent.stdout.readline) == b"started\n"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    provider, exits = machine.provider()
    [member] = await provider.adopt()
    assert (member.slot, member.worker) == ("test-0", "wrk_a")
    machine.kill(member)
    await eventually(lambda: exits == [("wrk_a", "its process has ended")])


async def test_without_pidfds_ends_are_found_by_looking(
    machine: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(_pid: int) -> int:
        raise OSError("not on this kernel")

    monkeypatch.setattr(os, "pidfd_open", unsupported)
    provider, exits = machine.provider()
    member = await provider.launch("test-0", "wrk_a")
    other, other_exits = machine.provider()
    assert await other.adopt() == [member]
    machine.kill(member)
    await eventually(lambda: len(exits) == 1)
    await eventually(lambda: len(other_exits) == 1)


async def test_an_external_pool_only_looks_on() -> None:
    provider = ExternalProvider()
    provider.watch(lambda *_: None)
    assert not provider.managed
    assert (await provider.health()).ok
    assert await provider.adopt() == []
    assert not await provider.ready("wrk_a")
    with pytest.raises(NoResourcesError):
        await provider.reserve("x-0")
    with pytest.raises(LaunchError):
        await provider.launch("x-0", "wrk_a")
    await provider.drain("wrk_a")
    await provider.release("x-0", "wrk_a", 1.0)
    await provider.close()


def test_a_node_is_told_only_what_concerns_a_worker() -> None:
    told = node_environment(
        {
            "TURBOSERVE_NATS_URL": "nats://broker",
            "TURBOSERVE_NATS_PASSWORD": "worker's own",
            "TURBOSERVE_HEALTH_PORT": "9",
            "TURBOSERVE_LIFELINE_FD": "3",
            "TURBOSERVE_DATA_DIR": "/here",
            "OMP_NUM_THREADS": "1",
            "PATH": "/here/bin",
        }
    )
    assert set(told) == {"TURBOSERVE_NATS_URL", "TURBOSERVE_NATS_PASSWORD", "OMP_NUM_THREADS"}

"""Providers of real processes: their end, their parents, and processes that are only observed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.autoscaler.provider_places import (
    PROGRAM,
    Place,
    clear,
    spawn,
)
from tests.helpers.waiting import eventually
from turboserve.autoscaler.providers.base import (
    LaunchError,
    NoResourcesError,
)
from turboserve.autoscaler.providers.external import ExternalProvider
from turboserve.autoscaler.providers.local import HEALTH_VARIABLE, LocalProvider, claim, pool_id
from turboserve.autoscaler.providers.process import environment_of, settled_environments
from turboserve.autoscaler.providers.ray_cluster import node_environment


@pytest.fixture
async def machine() -> AsyncIterator[Place]:
    """Real processes, for properties that only they have."""
    place = Place("local")
    yield place
    await clear(place)


async def test_exit_statuses_are_said_in_words(machine: Place) -> None:
    provider, exits = machine.provider("crash")
    await provider.launch("test-0", "wrk_a")
    await eventually(lambda: exits == [("wrk_a", "the process ended with status 3")])
    good, good_exits = machine.provider()
    provider_worker = await good.launch("test-0", "wrk_b")
    await machine.kill(provider_worker)
    await eventually(lambda: good_exits == [("wrk_b", "the process was ended by SIGKILL")])


async def test_who_does_not_listen_is_killed(machine: Place) -> None:
    provider, exits = machine.provider("deaf")
    await provider.launch("test-0", "wrk_a")
    await eventually(lambda: provider.ready("wrk_a"))
    await provider.release("test-0", "wrk_a", 0.3)
    assert exits == [("wrk_a", "the process was ended by SIGKILL")]


async def test_a_stopped_process_is_ended(machine: Place) -> None:
    provider, exits = machine.provider()
    provider_worker = await provider.launch("test-0", "wrk_a")
    assert provider_worker.pid is not None
    os.kill(provider_worker.pid, signal.SIGSTOP)
    await provider.release("test-0", "wrk_a", 0.3)
    assert len(exits) == 1


async def test_a_probe_that_fails_is_not_ready(machine: Place) -> None:
    provider, _ = machine.provider("never")
    provider_worker = await provider.launch("test-0", "wrk_a")
    pid = provider_worker.pid
    assert pid is not None

    async def refuses() -> bool:
        try:
            port = int(environment_of(pid)[HEALTH_VARIABLE])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except (KeyError, OSError):
            return False
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: worker\r\nConnection: close\r\n\r\n")
        answer = await reader.readline()
        writer.close()
        return b" 503 " in answer

    await eventually(refuses)
    assert not await provider.ready("wrk_a")


async def test_a_command_that_is_not_there(machine: Place) -> None:
    provider = LocalProvider("p", ["/nowhere/worker"], {})
    with pytest.raises(LaunchError, match="/nowhere/worker"):
        await provider.launch("test-0", "wrk_a")
    assert await provider.adopt() == []


async def test_a_member_that_another_process_has_claimed_is_left_out(machine: Place) -> None:
    provider, _ = machine.provider()
    with claim(machine.pool, "test-0"):
        with pytest.raises(LaunchError, match="another process starts a worker in pool member test-0"):
            await provider.launch("test-0", "wrk_a")
        await provider.launch("test-1", "wrk_b")
    await provider.launch("test-0", "wrk_a")
    assert {found.worker for found in await provider.adopt()} == {"wrk_a", "wrk_b"}


async def test_only_the_loop_looks_at_the_known_processes(machine: Place) -> None:
    """The loop removes a process that ends, while a thread looks for unknown ones."""

    class OfTheLoop(dict[str, Any]):
        def values(self) -> Any:
            assert threading.current_thread() is threading.main_thread()
            return super().values()

    provider, _ = machine.provider()
    assert isinstance(provider, LocalProvider)
    provider._processes = OfTheLoop()
    await provider.launch("test-0", "wrk_a")
    assert [found.worker for found in await provider.adopt()] == ["wrk_a"]


async def test_pools_do_not_see_each_other(machine: Place) -> None:
    provider, _ = machine.provider()
    await provider.launch("test-0", "wrk_a")
    stranger = LocalProvider(pool_id("test", "another broker"), ["x"], {})
    assert await stranger.adopt() == []


async def test_children_of_a_worker_are_not_workers(machine: Place) -> None:
    """Children inherit the worker's environment."""
    provider, _ = machine.provider()
    provider_worker = await provider.launch("test-0", "wrk_a")
    assert provider_worker.pid is not None
    script = "import time; time.sleep(30)"
    environment = {**os.environ, "TURBOSERVE_POOL_ID": machine.pool, "TURBOSERVE_POOL_MEMBER": "test-7"}
    environment["TURBOSERVE_WORKER_ID"] = "wrk_child"
    child = await spawn([sys.executable, "-I", "-S", "-c", script], env=environment)
    try:
        await eventually(lambda: "TURBOSERVE_WORKER_ID" in environment_of(child.pid))
        assert [m.worker for m in await provider.adopt()] == ["wrk_a"]
    finally:
        child.kill()
        child.wait()


async def test_a_worker_outlives_the_process_that_started_it(machine: Place) -> None:
    """After kill -9 of the autoscaler, its workers continue and the next autoscaler finds them."""
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
    [provider_worker] = await provider.adopt()
    assert (provider_worker.member, provider_worker.worker) == ("test-0", "wrk_a")
    await machine.kill(provider_worker)
    await eventually(lambda: exits == [("wrk_a", "the process has ended")])


async def test_without_pidfds_ends_are_found_by_looking(
    machine: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(_pid: int) -> int:
        raise OSError("not on this kernel")

    monkeypatch.setattr(os, "pidfd_open", unsupported)
    provider, exits = machine.provider()
    provider_worker = await provider.launch("test-0", "wrk_a")
    other, other_exits = machine.provider()
    assert await other.adopt() == [provider_worker]
    await machine.kill(provider_worker)
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


def test_a_node_gets_only_the_settings_of_a_worker() -> None:
    told = node_environment(
        {
            "TURBOSERVE_NATS_URL": "nats://broker",
            "TURBOSERVE_NATS_PASSWORD": "worker's own",
            "TURBOSERVE_HEALTH_PORT": "9",
            "TURBOSERVE_LIFELINE_FD": "3",
            "OMP_NUM_THREADS": "1",
            "PATH": "/here/bin",
        }
    )
    assert set(told) == {"TURBOSERVE_NATS_URL", "TURBOSERVE_NATS_PASSWORD", "OMP_NUM_THREADS"}


def test_a_process_is_known_by_its_environment_from_its_first_moment() -> None:
    for number in range(40):
        child = subprocess.Popen(["/bin/sleep", "60"], env={"WHO": str(number)}, start_new_session=True)
        try:
            assert settled_environments([child.pid]) == {child.pid: {"WHO": str(number)}}
        finally:
            child.kill()
        # First a zombie, then no process.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert settled_environments([child.pid]) == {child.pid: {}}
        child.wait()
        assert settled_environments([child.pid]) == {child.pid: {}}


WIPES = """
import ctypes, pathlib, time
fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
begin, end = int(fields[47]), int(fields[48])
ctypes.memset(begin, 0, end - begin)
print("wiped", flush=True)
time.sleep(60)
"""


def test_a_process_that_overwrote_its_environment_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Incident:

    Postgres's processes overwrite theirs and each lead a session; each listing waited a second for them.
    """
    command, told = [sys.executable, "-c", WIPES], {"WHO": "me"}
    with subprocess.Popen(command, env=told, stdout=subprocess.PIPE, start_new_session=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"wiped\n"
            monkeypatch.setattr("time.sleep", lambda _: pytest.fail("waited"))
            assert settled_environments([child.pid]) == {child.pid: {}}
        finally:
            child.kill()

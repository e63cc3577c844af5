"""Listeners of workers during migrations: only at their transfer address, with every backend."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.worker.test_service_migrations import begin as begin_migration
from tests.worker.test_service_migrations import commit, migrated, reported
from tests.worker.worker_scene import Scene, environment, pool, scene, store
from turboserve.contracts.workers import MigrationStage
from turboserve.worker.transfer import nixl
from turboserve.worker.transfer.interface import (
    Interface,
    InterfaceError,
    confine_libraries,
    find_interface,
)
from turboserve.worker.transfer.listeners import opened_by

__all__ = ["environment", "pool", "scene", "store"]

ROOT = Path(__file__).parents[2]
NAMESPACE = "tests.security.transfer_in_namespace"
LOOPBACK = "127.0.0.1"
SET_FOR_LIBRARIES = ("UCX_NET_DEVICES", "NCCL_SOCKET_IFNAME")
COPIED_BYTES = "turboserve_worker_transfer_received_bytes_total"


def listeners(pid: int) -> set[tuple[str, int]]:
    """Return where a process listens, TCP and UDP of any family."""
    found = psutil.Process(pid).net_connections("inet")
    waiting = [one for one in found if one.status == psutil.CONN_LISTEN or one.type == socket.SOCK_DGRAM]
    return {(one.laddr.ip, one.laddr.port) for one in waiting if one.laddr}


async def test_workers_listen_at_their_transfer_address_alone(scene: Scene) -> None:
    """Incident: after a gloo link torch's store listened on every interface, and so did NIXL."""
    ways = [["gloo", "shm", "nixl"], ["gloo"], ["shm"], ["nixl"]][: 4 if nixl.installed() else 3]
    workers = await asyncio.gather(
        *(scene.worker(TURBOSERVE_TRANSFER_BACKENDS=json.dumps(names)) for names in ways)
    )
    source = workers[0]
    for target in workers[1:]:
        session = await scene.started(source)
        await scene.chunks(session, 2)
        await migrated(scene, session, target)
    copied_by = {
        way: scene.metric(worker, COPIED_BYTES, f'turboserve_transfer_backend="{way}"')
        for worker, [way] in zip(workers[1:], ways[1:], strict=True)
    }
    assert all(copied_by.values()), copied_by
    for worker in workers:
        found = listeners(scene.pool.processes[worker].pid)
        [address] = scene.loads[worker].transfer
        port = int(address.partition("?")[0].rpartition(":")[2])
        assert {(LOOPBACK, port), (LOOPBACK, scene.pool.health[worker])} <= found
        assert {host for host, _ in found} == {LOOPBACK}, found


@pytest.mark.soak
async def test_a_migration_goes_through_while_its_port_is_flooded(scene: Scene) -> None:
    """Half-open connections, silence and noise, from the same address as the target's."""
    source, target = await scene.worker(), await scene.worker()
    session = await scene.started(source)
    await scene.chunks(session, 2)
    [address] = scene.loads[source].transfer
    port = int(address.partition("?")[0].rpartition(":")[2])
    held: list[asyncio.StreamWriter] = []
    served = 0

    async def flood(noise: bytes) -> None:
        nonlocal served
        while True:
            try:
                _, writer = await asyncio.open_connection(LOOPBACK, port)
            except OSError:
                await asyncio.sleep(0.01)
                continue
            writer.write(noise)
            await asyncio.sleep(0.002)
            served += 1
            held.append(writer)
            if len(held) > 200:
                held.pop(0).close()

    process = psutil.Process(scene.pool.processes[source].pid)
    before = process.num_fds()
    floods = [asyncio.create_task(flood(noise)) for noise in (b"", b"\0\0\0\x10", os.urandom(64))]
    try:
        await scene.until(lambda: served > 300, "the flood runs")
        row = await begin_migration(scene, session, target)
        report = await reported(scene, row, MigrationStage.VERIFIED, MigrationStage.FAILED)
        assert report.stage is MigrationStage.VERIFIED, report
        await commit(scene, row, report)
        assert process.num_fds() < before + 300
    finally:
        for task in floods:
            task.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
        for writer in held:
            writer.close()
    assert (await scene.chunks(session, report.next_chunk + 2))[-1].header.worker == target


def why_no_namespaces() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    if any(shutil.which(tool) is None for tool in ("unshare", "nsenter", "ip")):
        return "unshare, nsenter or ip is not installed"
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False).returncode:
        return "this machine gives no network namespaces"
    return None


@pytest.mark.skipif(why_no_namespaces() is not None, reason=str(why_no_namespaces()))
def test_another_address_of_the_machine_is_refused_and_no_stranger_reaches_a_library() -> None:
    """Tested from another machine (a namespace), which is not the peer of any migration."""
    backends = ["gloo", *(["nixl"] if nixl.installed() else [])]
    command = ["unshare", "--net", "--mount", sys.executable, "-m", NAMESPACE, *backends]
    # A worker's network of another test in this process has set them.
    own = {name: value for name, value in os.environ.items() if name not in SET_FOR_LIBRARIES}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=own, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for backend in backends:
        seen: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])[backend]
        assert seen["fetched"] is True
        transfer, other, port = seen["transfer"], seen["other"], seen["port"]
        assert {host for host, _ in seen["listeners"]} == {transfer}
        assert len(seen["listeners"]) > 1, "the library listens too"
        for host, number, answer in seen["answers"]:
            if (host, number) == (transfer, port):
                assert answer == "connected"
            elif host == transfer:
                assert answer == "nothing", (backend, number, "a library's listener answers a stranger")
            else:
                assert (host, answer) == (other, "refused")


# Valid values of transfer_host


def test_every_interface_is_refused_by_name() -> None:
    for every in ("0.0.0.0", "::", "0.0.0.0/0"):
        with pytest.raises(InterfaceError, match="every interface"):
            find_interface(every)


@pytest.mark.parametrize("wrong", ["198.51.100.7", "203.0.113.0/24", "no-such-name.invalid"])
def test_what_is_not_this_machines_is_refused(wrong: str) -> None:
    with pytest.raises(InterfaceError, match="transfer_host"):
        find_interface(wrong)


@pytest.mark.parametrize("host", [LOOPBACK, "lo", "127.0.0.0/8", "localhost"])
def test_loopback_by_any_of_its_names(host: str) -> None:
    found = find_interface(host)
    assert (found.address in (LOOPBACK, "::1"), found.name) == (True, "lo")


def test_the_machines_own_name_has_an_address_of_its_own() -> None:
    found = find_interface("hostname")
    own = {one.address for entries in psutil.net_if_addrs().values() for one in entries}
    assert found.address in own


def test_libraries_use_one_interface_and_what_an_operator_set_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "environ", {})
    for port in ("mlx5_0/ports/1", "mlx5_1/ports/1", "mlx5_1/ports/2"):
        (tmp_path / port).mkdir(parents=True)
    monkeypatch.setattr("turboserve.worker.transfer.interface.INFINIBAND", tmp_path)
    os.environ["NCCL_SOCKET_IFNAME"] = "ib0"
    confine_libraries(Interface("192.0.2.1", "eth0", ("192.0.2.1",)))
    assert os.environ["UCX_NET_DEVICES"] == "eth0,mlx5_0:1,mlx5_1:1,mlx5_1:2"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


PATIENCE_S = 60.0
REFUSED_S = 0.5
"""Nothing answers to a host that is refused."""


def reached(address: tuple[str, int], source: str, limit_s: float = REFUSED_S) -> bool:
    with socket.socket() as one:
        one.settimeout(limit_s)
        one.bind((source, 0))
        try:
            one.connect(address)
        except TimeoutError:
            return False
        return True


def test_a_library_listener_accepts_the_peer_only_and_then_no_host() -> None:
    listener, found = opened_by(lambda: socket.create_server((LOOPBACK, 0)))
    with listener:
        [address] = found.addresses
        assert address == listener.getsockname()
        found.only_from(["127.0.0.9", "127.0.0.5", "::1"])
        assert reached(address, "127.0.0.5", PATIENCE_S)
        assert not reached(address, LOOPBACK)
        accepted, _ = listener.accept()
        with accepted:
            found.refuse_all()
            assert not reached(address, "127.0.0.5")
        found.close()
    assert not opened_by(lambda: None)[1].addresses


def test_the_same_holds_for_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        listener, found = opened_by(lambda: socket.create_server(("::1", 0), family=socket.AF_INET6))
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
    with listener:
        [address] = found.addresses

        def connects(limit_s: float = REFUSED_S) -> bool:
            with socket.socket(socket.AF_INET6) as one:
                one.settimeout(limit_s)
                try:
                    one.connect(address)
                except TimeoutError:
                    return False
                return True

        found.only_from(["fd00::1", "::1"])
        assert connects(PATIENCE_S)
        found.only_from(["fd00::1"])
        assert not connects()
        found.close()

"""Three NATS servers of one stack: streams survive any one of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import nats.errors
import pytest
from nats.aio.client import Client
from nats.js import api
from nats.js.errors import APIError

from tests.helpers.waiting import eventually
from turboserve.cli.embedded import Layout, NatsServer, NotReadyError, Ports
from turboserve.cli.embedded.running import running
from turboserve.cli.stack.brokers import nats_servers
from turboserve.cli.stack.options import InvalidOptionError, Options
from turboserve.config import Settings
from turboserve.state_store.settings import Settings as StoreSettings
from turboserve.state_store.streams import wanted

PATIENCE_S = 120.0
SUBJECT = "chunk.ses_1.wk1"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NatsServer]]:
    layout = Layout(tmp_path_factory.mktemp("cluster") / "data")
    layout.create()
    servers = nats_servers(Options(nats=3), layout, Ports(layout.ports), ["wk1"])
    with running(servers, layout.logs / "nats.log"):
        yield servers


async def connected(servers: list[NatsServer]) -> Client:
    async def ignore(_: Exception) -> None:
        """Errors are raised to the caller as well."""

    return await nats.connect(
        [server.url() for server in servers],
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.2,
        connect_timeout=2,
        ping_interval=Settings(failover="short").broker_ping_s,  # type: ignore[arg-type]
        error_cb=ignore,
    )


async def published(client: Client, number: int) -> api.PubAck:
    """Append one message, and repeat that until it is acknowledged."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            headers = {"Nats-Msg-Id": f"ses_1:{number}"}
            return await client.jetstream(timeout=1.0).publish(SUBJECT, b"%d" % number, headers=headers)
        except (TimeoutError, nats.errors.Error):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.1)


async def is_alive(server: NatsServer) -> bool:
    with suppress(NotReadyError):
        await server.alive()
        return True
    return False


async def test_nothing_that_was_acknowledged_is_lost_with_a_frozen_leader(cluster: list[NatsServer]) -> None:
    client = await connected(cluster)
    [chunks, _] = wanted(StoreSettings(log_replicas=3))
    leader = ""

    async def created() -> bool:
        nonlocal leader
        # The first election may not be over.
        try:
            info = await client.jetstream(timeout=5.0).add_stream(chunks.evolve(max_bytes=2**20))
        except (TimeoutError, APIError, nats.errors.Error):
            return False
        assert info.cluster is not None
        assert info.config.num_replicas == 3
        leader = info.cluster.leader or ""
        return bool(leader)

    await eventually(created, PATIENCE_S)
    for number in range(5):
        await published(client, number)
    [frozen] = [server for server in cluster if server.server_name == leader]
    others = [server for server in cluster if server is not frozen]
    pid = int(frozen.pid_file.read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        for number in range(5, 8):
            await published(client, number)
        for server in others:
            # A supervisor must not restart servers for the fault of another one. A busy machine is only slow.
            await eventually(partial(is_alive, server), PATIENCE_S)
        with pytest.raises(NotReadyError):
            await frozen.alive()

        async def led_by_another() -> bool:
            # While the servers elect a leader of their own, they answer no such request.
            try:
                info = await client.jetstream(timeout=5.0).stream_info(str(chunks.name))
            except (TimeoutError, APIError, nats.errors.Error):
                return False
            return info.cluster is not None and info.cluster.leader not in (None, "", leader)

        await eventually(led_by_another, PATIENCE_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (await published(client, 3)).duplicate
    assert (await published(client, 8)).seq == 9
    await client.close()


def test_a_cluster_needs_a_majority() -> None:
    with pytest.raises(InvalidOptionError, match="--nats: 2 is not 1, 3 or 5"):
        Options(nats=2)


def test_a_stack_refuses_a_model_that_is_not_installed() -> None:
    with pytest.raises(InvalidOptionError, match="--model: no model 'toyworld-tiny' is installed"):
        Options(model="toyworld-tiny")


async def test_the_servers_share_the_disk(cluster: list[NatsServer]) -> None:
    alone = NatsServer(cluster[0].directory, 1, {"admin": "secret"})
    (alone.directory / "max_file_store").unlink()
    try:
        limit = alone.store_limit()
        (alone.directory / "max_file_store").unlink()
        assert cluster[0].store_limit() == pytest.approx(limit / 3, rel=0.05)
    finally:
        cluster[0].store_limit()


def test_a_cluster_has_folders_of_its_own(tmp_path: Path) -> None:
    """A server that was alone would delete its streams when it joins a cluster."""
    layout = Layout(tmp_path)
    layout.create()
    folders = {
        count: {
            server.directory for server in nats_servers(Options(nats=count), layout, Ports(layout.ports), [])
        }
        for count in (1, 3, 5)
    }
    assert [len(folders[count]) for count in (1, 3, 5)] == [1, 3, 5]
    assert len(set.union(*folders.values())) == 9

"""The real servers, started from their wheels."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import asyncpg
import nats
import nats.errors
import psutil
import pytest
import redis

from turboserve import subjects
from turboserve.cli.embedded import Layout, NatsServer, Ports, PostgresServer, RedisServer, guard
from turboserve.cli.embedded.postgres import ensure_database
from turboserve.cli.embedded.running import running
from turboserve.cli.embedded.server import EmbeddedServer

PATIENCE_S = 120.0
"""For what a busy machine may take long for, such as a server that writes everything down before it ends."""


async def test_nats_accepts_a_chunk_of_8_mb_and_keeps_it_on_disk(nats_url: str) -> None:
    client = await nats.connect(nats_url)
    jetstream = client.jetstream()
    await jetstream.add_stream(name="BIG", subjects=["big"])
    ack = await jetstream.publish("big", bytes(8 * 2**20 - 1024))
    assert ack.seq == 1
    assert client.max_payload == 8 * 2**20
    await client.close()


async def test_nats_refuses_a_service_what_the_table_does_not_grant(
    nats_server: NatsServer, nats_url: str
) -> None:
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error))

    client = await nats.connect(nats_server.url("gateway"), error_cb=note)
    own = subjects.OWN.of("s1")
    await client.publish(own, b"{}")
    await client.flush()
    await asyncio.sleep(0.05)
    await client.close()
    assert any("permissions violation" in text and own in text for text in refused)


async def test_nats_refuses_strangers(nats_server: NatsServer) -> None:
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        await nats.connect(
            nats_server.address, allow_reconnect=False, max_reconnect_attempts=0, error_cb=_ignore
        )


def test_redis_refuses_strangers(redis_server: RedisServer) -> None:
    with redis.Redis(port=redis_server.port) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


async def test_postgres_refuses_a_wrong_password(postgres_server: PostgresServer) -> None:
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(postgres_server.url().replace(postgres_server.password, "wrong"))


async def test_modules_get_a_database_of_their_own(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    assert (await connection.fetchval("select current_database()")).startswith("test_")
    await connection.close()


async def test_a_database_that_exists_is_left_alone(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    connection = await asyncpg.connect(postgres_url)
    await connection.execute("create table kept (x int)")
    await connection.close()
    await ensure_database(postgres_server.url("postgres"), postgres_url.rsplit("/", 1)[1])
    connection = await asyncpg.connect(postgres_url)
    assert await connection.fetchval("select count(*) from kept") == 0
    await connection.close()


@pytest.fixture
def own_servers(tmp_path: Path) -> list[EmbeddedServer]:
    layout = Layout(tmp_path / "data")
    layout.create()
    ports = Ports(layout.ports)
    return [
        NatsServer(
            layout.server("nats"),
            ports.get("nats"),
            ports.get("nats_monitor"),
            {"admin": layout.secret("nats.admin")},
            subjects.permissions,
        ),
        RedisServer(layout.server("redis"), ports.get("redis"), layout.secret("redis")),
        PostgresServer(layout.server("postgres"), ports.get("postgres"), layout.secret("postgres")),
    ]


def test_killed_servers_start_again_with_their_data(
    own_servers: list[EmbeddedServer], tmp_path: Path
) -> None:
    broker, _, postgres = own_servers
    assert isinstance(broker, NatsServer)
    assert isinstance(postgres, PostgresServer)
    with running(own_servers, tmp_path / "log"):
        asyncio.run(_write(broker.url(), postgres.url()))
        for server in own_servers:
            os.kill(int(server.pid_file.read_text()), signal.SIGKILL)
    # A process id that by now is somebody else's must not be taken for a running Postgres.
    (postgres.cluster / "postmaster.pid").write_text(f"{os.getpid()}\n{postgres.cluster}\n")
    with running(own_servers, tmp_path / "log"):
        assert asyncio.run(_read(broker.url(), postgres.url())) == (1, 7)


def test_a_killed_guard_takes_its_server_with_it(own_servers: list[EmbeddedServer], tmp_path: Path) -> None:
    for server in own_servers:
        asyncio.run(server.prepare())
        guard = subprocess.Popen(server.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        pid = _wait_for_pid(server)
        process = psutil.Process(pid)
        guard.kill()
        guard.wait()
        process.wait(timeout=PATIENCE_S)
        assert not process.is_running()


def test_a_killed_guard_takes_a_server_with_it_that_only_starts_in_the_background_of_a_shell(
    tmp_path: Path,
) -> None:
    """There SIGQUIT is ignored, and a server that has no handler yet would go on ignoring it."""
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-I", "-S", guard.__file__, "--pid-file", str(pid_file)]
    command += ["--death-signal", str(int(signal.SIGQUIT)), "--", "/bin/sleep", "600"]
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        started = subprocess.Popen(command)
    finally:
        signal.signal(signal.SIGQUIT, before)
    while not pid_file.exists():
        time.sleep(0.01)
    process = psutil.Process(int(pid_file.read_text()))
    while process.name() != "sleep":
        time.sleep(0.01)
    started.kill()
    started.wait()
    process.wait(timeout=PATIENCE_S)
    assert not process.is_running()


def test_a_guard_ends_with_the_status_of_its_server(own_servers: list[EmbeddedServer]) -> None:
    server = own_servers[1]
    asyncio.run(server.prepare())
    guard = subprocess.Popen(server.command(), stdout=subprocess.DEVNULL)
    os.kill(_wait_for_pid(server), signal.SIGKILL)
    assert guard.wait(timeout=PATIENCE_S) == 128 + signal.SIGKILL


def test_a_server_waits_for_the_last_process_of_its_predecessor(own_servers: list[EmbeddedServer]) -> None:
    """Two servers on one directory would destroy it: the second starts only when the first is gone."""
    server = own_servers[1]
    asyncio.run(server.prepare())
    first = subprocess.Popen(server.command(), stdout=subprocess.DEVNULL)
    pid = _wait_for_pid(server)
    second = subprocess.Popen(server.command(), stdout=subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(timeout=0.5)
    assert int(server.pid_file.read_text()) == pid
    first.terminate()
    first.wait(timeout=PATIENCE_S)
    while int(server.pid_file.read_text()) == pid:
        assert second.poll() is None
        time.sleep(0.01)
    second.terminate()
    assert second.wait(timeout=PATIENCE_S) in (0, 128 + signal.SIGTERM)


def _wait_for_pid(server: EmbeddedServer) -> int:
    while not server.pid_file.exists():
        time.sleep(0.01)
    return int(server.pid_file.read_text())


async def _write(nats_url: str, postgres_url: str) -> None:
    client = await nats.connect(nats_url)
    await client.jetstream().add_stream(name="KEPT", subjects=["kept"])
    await client.jetstream().publish("kept", b"x")
    await client.close()
    connection = await asyncpg.connect(postgres_url)
    await connection.execute("create table kept (x int); insert into kept values (7)")
    await connection.close()


async def _read(nats_url: str, postgres_url: str) -> tuple[int, int]:
    client = await nats.connect(nats_url)
    messages = (await client.jetstream().stream_info("KEPT")).state.messages
    await client.close()
    connection = await asyncpg.connect(postgres_url)
    value: int = await connection.fetchval("select x from kept")
    await connection.close()
    return messages, value


async def _ignore(_error: Exception) -> None:
    return None

"""The real servers, started from their wheels."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import asyncpg
import nats.errors
import psutil
import pytest
import redis
from nats.js.errors import APIError

from tests.helpers.broker_clients import connected_client, processed
from tests.helpers.waiting import eventually, eventually_blocking
from turboserve import subjects
from turboserve.cli.embedded import (
    Layout,
    NatsServer,
    NotReadyError,
    Ports,
    PostgresServer,
    RedisServer,
    ServerFullError,
    guard,
)
from turboserve.cli.embedded.nats_probe import HEALTH_USER, server_health
from turboserve.cli.embedded.running import running
from turboserve.cli.embedded.server import EmbeddedServer, ServerUnhealthyError, ServerUnresponsiveError
from turboserve.subjects import ADMIN

PATIENCE_S = 120.0
"""Time limit of slow operations on a busy machine, such as a server's writes before it ends."""


async def answered(question: Callable[[], Awaitable[None]]) -> None:
    """Probe as the supervisor does, and repeat while a busy machine takes longer than its limit."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await question()
        except ServerFullError:
            raise
        except (ServerUnresponsiveError, ServerUnhealthyError):
            if time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.1)


async def test_nats_accepts_a_chunk_of_8_mb_and_keeps_it_on_disk(nats_url: str) -> None:
    client = await connected_client(nats_url)
    jetstream = client.jetstream(timeout=PATIENCE_S)
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

    client = await connected_client(nats_server.url("gateway"), error_cb=note)
    own = subjects.OWN.of("s1")
    await client.publish(own, b"{}")
    # The broker's error comes before its answer to a ping.
    await processed(client)
    await client.close()
    assert any("permissions violation" in text and own in text for text in refused)


async def test_nats_refuses_strangers(nats_server: NatsServer) -> None:
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        await connected_client(
            nats_server.address, allow_reconnect=False, max_reconnect_attempts=0, error_cb=_ignore
        )


async def test_nats_has_no_monitor_and_health_is_asked_with_a_login(nats_server: NatsServer) -> None:
    listening = {
        connection.laddr.port
        for connection in psutil.Process(int(nats_server.pid_file.read_text())).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {nats_server.port}
    await answered(nats_server.probe)
    await answered(nats_server.alive)
    # Services and tools are in another account, which does not receive the system's requests.
    client = await connected_client(nats_server.url(ADMIN))
    for request in ("VARZ", "SUBSZ", "JSZ", "HEALTHZ"):
        with pytest.raises(nats.errors.NoRespondersError):
            await client.request(f"$SYS.REQ.SERVER.PING.{request}", timeout=PATIENCE_S)
    await client.close()
    with pytest.raises(NotReadyError, match=r"(?i)authorization"):
        await server_health(nats_server.address, "wrong", {})


async def test_the_health_user_may_ask_for_health_and_nothing_else(nats_server: NatsServer) -> None:
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error).lower())

    client = await connected_client(
        nats_server.address,
        user=HEALTH_USER,
        password=json.loads(
            re.findall(rf'user: "{HEALTH_USER}", password: (".*?")', nats_server.config())[0]
        ),
        error_cb=note,
    )
    asked = ["$SYS.REQ.SERVER.PING.CONNZ", "$SYS.REQ.SERVER.PING.VARZ", "chunk.ses_1", "state.session.end"]
    for subject in asked:
        await client.publish(subject, b"{}")
    await client.subscribe("$SYS.>")
    await eventually(lambda: len(refused) > len(asked), PATIENCE_S, lambda: str(refused))
    await client.close()
    for subject in (*asked, "$SYS.>"):
        refusal = (
            f'permissions violation for {"publish" if subject in asked else "subscription"} to "{subject}"'
        )
        assert any(refusal.lower() in text for text in refused), (subject, refused)


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
    await postgres_server.ensure_database(postgres_url.rsplit("/", 1)[1])
    connection = await asyncpg.connect(postgres_url)
    assert await connection.fetchval("select count(*) from kept") == 0
    await connection.close()


async def test_servers_that_are_well_take_what_the_supervisor_writes(
    nats_server: NatsServer, redis_server: RedisServer, postgres_server: PostgresServer
) -> None:
    for _ in range(2):
        for server in (nats_server, redis_server, postgres_server):
            await answered(server.alive)


def test_a_broker_whose_store_is_full_by_its_own_limit_refuses_and_is_not_called_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart would not help: its data still exist afterwards."""
    monkeypatch.setattr("turboserve.cli.embedded.nats.MAX_STORE_BYTES", 2**20)
    layout = Layout(tmp_path / "data")
    layout.create()
    port = Ports(layout.ports).get("nats")
    server = NatsServer(layout.server("nats"), port, {"admin": "secret"})

    async def fill() -> None:
        client = await connected_client(server.url())
        jetstream = client.jetstream(timeout=PATIENCE_S)
        await jetstream.add_stream(name="BIG", subjects=["big"])
        with suppress(APIError):
            for _ in range(30):
                await jetstream.publish("big", bytes(2**16))
        await client.close()
        await answered(server.healthz)
        with pytest.raises(ServerFullError):
            await answered(server.alive)

    with running([server], tmp_path / "log"):
        asyncio.run(fill())


def test_the_ports_of_a_stack_that_another_process_runs_are_only_read(tmp_path: Path) -> None:
    """Incident: a tool that read the folder of a running stack gave it other ports."""
    layout = Layout(tmp_path / "data")
    layout.create()
    layout.lock.write_text("1\n")
    with layout.lock.open() as lock, socket.create_server(("127.0.0.1", 0)) as server:
        fcntl.flock(lock, fcntl.LOCK_EX)
        port: int = server.getsockname()[1]
        stored = json.dumps({"nats": port})
        layout.ports.write_text(stored)
        assert Ports(layout.ports).get("nats") == port
        assert Ports(layout.ports).get("another") != port
        assert layout.ports.read_text() == stored
        # The process that runs it chooses another port instead of one that is taken.
        layout.lock.write_text(f"{os.getpid()}\n")
        assert Ports(layout.ports).get("nats") != port


@pytest.fixture
def own_servers(tmp_path: Path) -> list[EmbeddedServer]:
    layout = Layout(tmp_path / "data")
    layout.create()
    ports = Ports(layout.ports)
    return [
        NatsServer(
            layout.server("nats"),
            ports.get("nats"),
            {"admin": layout.secret("nats.admin")},
        ),
        RedisServer(layout.server("redis"), ports.get("redis"), layout.secret("redis")),
        PostgresServer(
            layout.server("postgres"),
            ports.get("postgres"),
            layout.secret("postgres"),
            layout.secret("postgres.services"),
        ),
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
    # A process id that now belongs to another process must not be taken for a running Postgres.
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
    """There SIGQUIT is ignored, and a server without a handler would continue to ignore it."""
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-I", "-S", guard.__file__, "--pid-file", str(pid_file)]
    command += ["--death-signal", str(int(signal.SIGQUIT)), "--", "/bin/sleep", "600"]
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        started = subprocess.Popen(command)
    finally:
        signal.signal(signal.SIGQUIT, before)
    eventually_blocking(lambda: pid_file.exists())
    process = psutil.Process(int(pid_file.read_text()))
    eventually_blocking(lambda: process.name() == "sleep")
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
    """Two servers on one directory would destroy it. The second starts only when the first has ended."""
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
    # A server that has just begun may not handle the signal yet, and is killed after its grace period.
    eventually_blocking(lambda: _serves(server))
    second.terminate()
    assert second.wait(timeout=PATIENCE_S) in (0, 128 + signal.SIGTERM)


def _serves(server: EmbeddedServer) -> bool:
    try:
        asyncio.run(server.probe())
    except (NotReadyError, ServerUnresponsiveError, OSError):
        return False
    return True


def _wait_for_pid(server: EmbeddedServer) -> int:
    eventually_blocking(lambda: server.pid_file.exists())
    return int(server.pid_file.read_text())


async def _write(nats_url: str, postgres_url: str) -> None:
    client = await connected_client(nats_url)
    await client.jetstream(timeout=PATIENCE_S).add_stream(name="KEPT", subjects=["kept"])
    await client.jetstream(timeout=PATIENCE_S).publish("kept", b"x")
    await client.close()
    connection = await asyncpg.connect(postgres_url)
    await connection.execute("create table kept (x int); insert into kept values (7)")
    await connection.close()


async def _read(nats_url: str, postgres_url: str) -> tuple[int, int]:
    client = await connected_client(nats_url)
    messages = (await client.jetstream(timeout=PATIENCE_S).stream_info("KEPT")).state.messages
    await client.close()
    connection = await asyncpg.connect(postgres_url)
    value: int = await connection.fetchval("select x from kept")
    await connection.close()
    return messages, value


async def _ignore(_error: Exception) -> None:
    return None

"""The whole supervisor with real servers and stand-ins for the services."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import nats.errors
import psutil
import pytest
from typer.testing import CliRunner

from tests.helpers import forked_process
from tests.helpers.broker_clients import PATIENCE_S, connected_client
from turboserve.cli.embedded import Layout
from turboserve.cli.main import app
from turboserve.cli.stack import run
from turboserve.cli.stack.background import BackgroundStack
from turboserve.cli.stack.options import Options, Workers
from turboserve.cli.stack.plan import Plan
from turboserve.cli.stack.run import INSTALLED

RUNNER = CliRunner()
HERE = Path(__file__).parent / "stack"
UP = (sys.executable, str(HERE / "up_with_dummies.py"))
ENVIRONMENT = {"PYTHONPATH": str(HERE)}
SAID_S = 60.0
SERVERS = ("nats", "redis", "postgres")
SERVICES = ("state-store", "scheduler", "autoscaler", "recorder", "gateway")


def dummy_stack(data: Path, *options: str, **environment: str) -> BackgroundStack:
    return BackgroundStack(data, *options, environment={**ENVIRONMENT, **environment}, command=UP)


def up(data: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return forked_process.run([*UP[1:], "--data", str(data), *options], {**os.environ, **ENVIRONMENT})


def said(stack: BackgroundStack, *texts: str) -> None:
    """Wait until the output contains all texts: a recorded event may be printed a moment later."""
    stack.wait(lambda: all(text in stack.output for text in texts), SAID_S)


def gone(pid: int) -> bool:
    """Return whether the process has ended; its parent may not have collected it yet."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def dummies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundStack]:
    with dummy_stack(tmp_path_factory.mktemp("stack") / "data", "--workers", "2") as stack:
        yield stack


def test_everything_is_ready_and_on_record(dummies: BackgroundStack) -> None:
    record = dummies.record
    assert set(record.processes) == {*SERVERS, *SERVICES}
    assert all(process["state"] == "ready" for process in record.processes.values())
    assert len(record.worker_pids()) == 2
    # An open port is reported together with the address.
    said(
        dummies,
        f"TurboServe is up:  {record.url}/",
        "Reachable by this machine's users and programs.",
        "No API keys: every client that reaches this address may",
    )
    installed = (
        r"Installed in \d+ s, \d+ MB\. " if INSTALLED.is_file() and INSTALLED.read_text().strip() else ""
    )
    assert re.search(rf"^ *{installed}Started in \d+ s\.$", dummies.output, re.MULTILINE)
    assert (dummies.data / "stack.json").stat().st_mode & 0o777 == 0o600


def test_lines_carry_the_name_of_their_service_also_a_workers(dummies: BackgroundStack) -> None:
    def lines() -> list[str]:
        return dummies.output.splitlines()

    def workers() -> int:
        return sum(line.startswith("worker ") and "service lives" in line for line in lines())

    def gateways() -> int:
        return sum(line.startswith("gateway ") and "service lives" in line for line in lines())

    def of_workers() -> int:
        return (dummies.data / "logs" / "worker.log").read_text().count("service lives")

    dummies.wait(lambda: workers() >= 2 and of_workers() >= 2 and gateways() >= 1, SAID_S)
    assert (workers(), of_workers()) == (2, 2)


@pytest.mark.parametrize("name", SERVERS)
def test_a_killed_server_comes_back_on_its_port_with_its_data(dummies: BackgroundStack, name: str) -> None:
    before = dummies.record
    others = {n: p["pid"] for n, p in before.processes.items() if n != name}
    asyncio.run(_write(before.nats_url, before.postgres_url))
    dummies.wait_until_back(name, dummies.kill(name))
    after = dummies.record
    assert after.processes[name]["port"] == before.processes[name]["port"]
    assert {n: p["pid"] for n, p in after.processes.items() if n != name} == others
    assert asyncio.run(_read(after.nats_url, after.postgres_url)) == (1, 7)


@pytest.mark.parametrize("name", ["nats", "redis"])
def test_a_killed_guard_is_restarted_with_its_server(dummies: BackgroundStack, name: str) -> None:
    described = dummies.record.processes[name]
    os.kill(described["guard_pid"], signal.SIGKILL)
    dummies.wait_until_back(name, described["pid"])
    assert gone(described["pid"])


def test_a_killed_service_comes_back(dummies: BackgroundStack) -> None:
    restarts = dummies.record.processes["gateway"]["restarts"]
    dummies.wait_until_back("gateway", dummies.kill("gateway"))
    assert dummies.record.processes["gateway"]["restarts"] == restarts + 1
    said(dummies, "status", "SIGKILL")


def test_a_service_that_hangs_is_killed_and_comes_back(data_dir: Path) -> None:
    with dummy_stack(data_dir, "--workers", "0", DUMMY_IMPATIENCE="0.7") as stack:
        pid = stack.record.processes["gateway"]["pid"]
        os.kill(pid, signal.SIGSTOP)
        stack.wait_until_back("gateway", pid)
        assert stack.record.processes["gateway"]["restarts"] == 1
        said(stack, "does not answer")
        assert gone(pid)
        assert all(stack.record.processes[name]["restarts"] == 0 for name in SERVICES if name != "gateway")


def test_servers_that_are_frozen_are_killed_and_come_back_with_their_data(data_dir: Path) -> None:
    """A stopped server does not notice that its guard is gone. It is killed by itself."""
    with dummy_stack(data_dir, "--workers", "0", DUMMY_SERVER_IMPATIENCE="0.3") as stack:
        record = stack.record
        asyncio.run(_write(record.nats_url, record.postgres_url))
        for name in SERVERS:
            os.kill(record.pid(name), signal.SIGSTOP)
        for name in SERVERS:
            stack.wait_until_back(name, record.pid(name))
            assert gone(record.pid(name))
            assert stack.record.processes[name]["port"] == record.processes[name]["port"]
        stack.wait(lambda: stack.output.count("does not answer") >= len(SERVERS), SAID_S)

        def kept() -> bool:
            try:
                return asyncio.run(_read(record.nats_url, record.postgres_url)) == (1, 7)
            except (OSError, nats.errors.Error, asyncpg.PostgresError, asyncpg.InterfaceError):
                # A server that is slow on a busy machine is taken for a frozen one once more.
                return False

        stack.wait(kept, SAID_S)


def test_a_second_up_on_the_same_data_says_so(dummies: BackgroundStack) -> None:
    second = up(dummies.data)
    assert second.returncode == 1
    assert f"already running at {dummies.url}" in second.stderr
    assert "Traceback" not in second.stderr


def test_status_shows_every_process_and_no_password(dummies: BackgroundStack) -> None:
    done = RUNNER.invoke(app, ["status", "--data", str(dummies.data)])
    assert done.exit_code == 0
    shown = done.output
    assert all(name in shown for name in (*SERVERS, *SERVICES, "worker", dummies.url))
    assert not any(
        secret in shown for secret in json.loads((dummies.data / "secrets.json").read_text()).values()
    )


def test_workers_outlive_their_autoscaler_but_not_the_stack(data_dir: Path) -> None:
    stack = dummy_stack(data_dir, "--workers", "2")
    with stack:
        workers = stack.record.worker_pids()
        stack.wait_until_back("autoscaler", stack.kill("autoscaler"))
        assert set(workers) <= set(stack.record.worker_pids())
        processes = stack.descendants()
    assert not [process for process in processes if process.is_running()]


def test_stop_is_in_order_and_leaves_status_0(data_dir: Path) -> None:
    stack = dummy_stack(data_dir)
    stack.start()
    processes = stack.descendants()
    assert stack.stop() == 0
    stopped = [line.split()[0] for line in stack.output.splitlines() if line.endswith("stops")]
    assert stopped == ["gateway", "autoscaler", "worker", "scheduler", "recorder", "state-store"]
    assert not [process for process in processes if process.is_running()]
    assert not (data_dir / "stack.json").exists()
    assert "killing" not in stack.output


def test_down_stops_the_stack_as_ctrl_c_does_and_its_logs_stay(data_dir: Path) -> None:
    with dummy_stack(data_dir) as stack:
        processes, url = stack.descendants(), stack.url
        # While it is suspended, the stack cannot end before the second command asks for it.
        supervisor = psutil.Process(stack.process.pid)
        supervisor.suspend()
        at_once = RUNNER.invoke(app, ["down", "--data", str(data_dir), "--timeout", "0.1"])
        assert at_once.exit_code == 1
        assert "--timeout: the stack has not ended within 0.1 s" in at_once.stderr
        threading.Timer(2.0, supervisor.resume).start()
        done = RUNNER.invoke(app, ["down", "--data", str(data_dir), "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout) == {
            "stopped": True, "url": url, "supervisor_pid": stack.process.pid
        }  # fmt: skip
        assert stack.process.wait(SAID_S) == 0
    assert not [process for process in processes if process.is_running()]
    shown = RUNNER.invoke(app, ["logs", "up", "-n", "1", "--data", str(data_dir), "--json"])
    assert json.loads(shown.stdout)["event"] == "stopped"


def test_kill_9_of_the_supervisor_leaves_no_orphan_and_the_next_start_works(data_dir: Path) -> None:
    stack = dummy_stack(data_dir, "--workers", "2")
    stack.start()
    # Workers whose autoscaler died are not below any direct child of the supervisor when it dies.
    stack.wait_until_back("autoscaler", stack.kill("autoscaler"))
    processes = stack.descendants()
    assert len(processes) > 10
    ports = {name: process["port"] for name, process in stack.record.processes.items()}
    stack.process.kill()
    stack.process.wait()
    _, left = psutil.wait_procs(processes, timeout=SAID_S)
    assert not left
    with dummy_stack(data_dir) as again:
        assert {name: process["port"] for name, process in again.record.processes.items()} == ports


def test_the_next_start_does_not_wait_for_the_end_of_what_was_killed(data_dir: Path) -> None:
    """The next start begins at once, while the guards of a killed stack still stop their servers."""
    first = dummy_stack(data_dir)
    first.start()
    first.process.kill()
    first.process.wait()
    with dummy_stack(data_dir) as second:
        assert second.record.ready


def test_what_never_comes_up_ends_the_stack_with_status_1(data_dir: Path) -> None:
    result = forked_process.run(
        [*UP[1:], "--data", str(data_dir)], {**os.environ, **ENVIRONMENT, "DUMMY_FAILS": "scheduler"}
    )
    assert result.returncode == 1
    assert "giving up process=scheduler" in result.stdout
    assert f"the logs are in {data_dir / 'logs'}" in result.stdout


def test_json_format_prints_only_json(data_dir: Path) -> None:
    stack = dummy_stack(data_dir, "--log-format", "json")
    stack.start()
    said(stack, "stack is up")
    stack.stop()
    records = [json.loads(line) for line in stack.output.splitlines()]
    assert {"up", "gateway", "worker", "postgres", "nats"} <= {record["service"] for record in records}
    assert any(record["event"] == "stack is up" and record["url"] for record in records)


def test_a_taken_port_that_was_asked_for_is_an_error(data_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = up(data_dir, "--port", str(port))
    assert result.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in result.stderr


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """The stacks that `turboserve up` would start in this process. None is started."""
    started: list[Options] = []

    def start(options: Options) -> int:
        started.append(options)
        return 0

    monkeypatch.setattr(run, "run", start)
    return started


@pytest.mark.parametrize("port", ["0", "65536", "x"])
def test_an_impossible_port_is_refused(data_dir: Path, port: str, starts: list[Options]) -> None:
    result = RUNNER.invoke(app, ["up", "--data", str(data_dir), "--port", port])
    assert result.exit_code == 2
    assert "--port" in result.stderr
    assert starts == []


@pytest.mark.parametrize("workers", ["", "-1", "3..1", "1..1000", "two"])
def test_impossible_workers_are_refused(data_dir: Path, workers: str, starts: list[Options]) -> None:
    result = RUNNER.invoke(app, ["up", "--data", str(data_dir), f"--workers={workers}"])
    assert result.exit_code == 1
    assert "--workers" in result.stderr
    assert starts == []


def test_possible_options_start_a_stack(data_dir: Path, starts: list[Options]) -> None:
    """The refusals above come from the options, not from what else would fail in this process."""
    result = RUNNER.invoke(app, ["up", "--data", str(data_dir), "--port", "8081", "--workers=1..3"])
    assert result.exit_code == 0, result.output
    [options] = starts
    assert (options.port, options.workers) == (8081, Workers.parse("1..3"))


async def _write(nats_url: str, postgres_url: str) -> None:
    client = await connected_client(nats_url)
    jetstream = client.jetstream(timeout=PATIENCE_S)
    await jetstream.add_stream(name="KEPT", subjects=["kept"])
    await jetstream.purge_stream("KEPT")
    await jetstream.publish("kept", b"x")
    await client.close()
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(
        "create table if not exists kept (x int); truncate kept; insert into kept values (7)"
    )
    await connection.close()


async def _read(nats_url: str, postgres_url: str) -> tuple[int, int]:
    client = await connected_client(nats_url)
    messages = (await client.jetstream(timeout=PATIENCE_S).stream_info("KEPT")).state.messages
    await client.close()
    connection = await asyncpg.connect(postgres_url)
    value: int = await connection.fetchval("select x from kept")
    await connection.close()
    return messages, value


def test_schedulers_that_stand_by_are_processes_of_their_own(data_dir: Path) -> None:
    layout = Layout(data_dir)
    layout.create()
    specs = {spec.name: spec for spec in Plan(Options(data_dir, schedulers=3), layout).processes()}
    schedulers = ["scheduler", "scheduler-2", "scheduler-3"]
    assert set(specs) == {*SERVERS, *SERVICES, *schedulers}
    assert len({spec.port for spec in specs.values()}) == len(specs)
    for name in schedulers:
        assert specs[name].command == specs["scheduler"].command
        assert specs[name].environment["TURBOSERVE_NATS_USER"] == "scheduler"
        assert specs[name].environment["TURBOSERVE_HEALTH_PORT"] == str(specs[name].port)
        assert specs[name].member.rank == specs["scheduler"].member.rank


def test_autoscalers_have_the_scope_of_their_stack(data_dir: Path) -> None:
    """Incident: one of two reached the broker through a proxy, and did not know the other one's workers."""
    layout = Layout(data_dir)
    layout.create()
    plan = Plan(Options(data_dir, autoscalers=2), layout)
    specs = {spec.name: spec for spec in plan.processes()}
    scopes = [specs[name].environment["TURBOSERVE_POOL_SCOPE"] for name in ("autoscaler", "autoscaler-2")]
    assert scopes == [plan.nats_address] * 2


def test_only_a_stack_with_webhooks_calls_receivers(data_dir: Path) -> None:
    layout = Layout(data_dir)
    layout.create()
    specs = {spec.name: spec for spec in Plan(Options(data_dir, webhooks=True), layout).processes()}
    assert set(specs) == {*SERVERS, *SERVICES, "webhooks"}
    assert specs["webhooks"].environment["TURBOSERVE_WEBHOOK_KEY"] == layout.secret("webhooks")
    others = [spec for name, spec in specs.items() if name != "webhooks"]
    assert not any(layout.secret("webhooks") in spec.environment.values() for spec in others)
    # A sender ends after what may create deliveries, and before the store that has them.
    ranks = {name: spec.member.rank for name, spec in specs.items()}
    assert ranks["scheduler"] < ranks["webhooks"] < ranks["state-store"]


def test_only_a_stack_with_redundancy_has_short_times(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(data_dir)
    layout.create()
    monkeypatch.delenv("TURBOSERVE_FAILOVER", raising=False)

    def times(gateways: int, schedulers: int, state_stores: int) -> set[str | None]:
        options = Options(data_dir, gateways=gateways, schedulers=schedulers, state_stores=state_stores)
        specs = Plan(options, layout).processes()
        return {spec.environment.get("TURBOSERVE_FAILOVER") for spec in specs if spec.kind == "service"}

    assert times(2, 2, 2) == {"short"}
    assert times(2, 2, 1) == times(1, 1, 1) == {None}
    monkeypatch.setenv("TURBOSERVE_FAILOVER", "patient")
    assert times(2, 2, 2) == {"patient"}

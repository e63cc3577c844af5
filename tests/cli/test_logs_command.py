"""`turboserve logs`: what a stack's processes have logged, in the order of time. `down` without a stack."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from turboserve.cli.logs import Tail, newest, time_of
from turboserve.cli.main import app
from turboserve.cli.stack import record

RUNNER = CliRunner()


def written(second: float, event: str, service: str = "gateway", level: str = "info") -> str:
    stamp = f"2026-11-23T13:00:{second:09.6f}+00:00"
    return json.dumps({"timestamp": stamp, "level": level, "service": service, "event": event, "n": 1})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "gateway.log").write_text(f"{written(1, 'first')}\n{written(4, 'fourth', level='error')}\n")
    (logs / "worker.log").write_text(
        f"{written(2, 'second', 'worker')}\nTraceback of no record\n{written(5, 'fifth', 'worker')}\n"
    )
    (logs / "postgres.log").write_text("2026-11-23 13:00:03.000 UTC [12] LOG:  third\n")
    return tmp_path


def test_lines_of_all_processes_come_in_the_order_of_time(data: Path) -> None:
    done = RUNNER.invoke(app, ["logs", "--data", str(data)])
    assert done.exit_code == 0, done.output
    lines = [line.split("│ ") for line in done.stdout.splitlines()]
    assert [name.strip() for name, _ in lines] == [
        "gateway", "worker", "worker", "postgres", "gateway", "worker"
    ]  # fmt: skip
    assert lines[2][1] == "Traceback of no record"
    assert "ERROR fourth n=1" in lines[4][1]


def test_processes_and_the_number_of_lines_can_be_chosen(data: Path) -> None:
    done = RUNNER.invoke(app, ["logs", "worker", "gateway", "-n", "2", "--data", str(data), "--json"])
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()] == ["fourth", "fifth"]
    postgres = RUNNER.invoke(app, ["logs", "postgres", "--data", str(data), "--json"])
    assert json.loads(postgres.stdout)["event"].endswith("third")
    assert RUNNER.invoke(app, ["logs", "-n", "0", "--data", str(data)]).stdout == ""


def test_what_has_no_log_is_refused_by_name(data: Path, tmp_path: Path) -> None:
    done = RUNNER.invoke(app, ["logs", "gatway", "--data", str(data)])
    assert done.exit_code == 1
    assert "NAME: 'gatway' has no log; known: gateway, postgres, worker" in done.stderr
    done = RUNNER.invoke(app, ["logs", "--data", str(tmp_path / "none")])
    assert done.exit_code == 1
    assert "no stack has run" in done.stderr


def test_a_followed_file_may_be_rotated_and_a_line_may_come_in_parts(data: Path) -> None:
    path = data / "logs" / "gateway.log"
    tail = Tail("gateway", path, path.stat().st_size)
    assert tail.read() == []
    with path.open("a") as file:
        file.write("half")
    assert tail.read() == []
    with path.open("a") as file:
        file.write(" a line\nwhole\n")
    assert tail.read() == ["half a line", "whole"]
    path.rename(path.with_name("gateway.log.1"))
    assert tail.read() == []
    path.write_text("next\n")
    assert tail.read() == ["next"]


def test_the_newest_lines_are_those_of_all_files_together(data: Path) -> None:
    files = {path.stem: path for path in (data / "logs").iterdir()}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    assert [line.name for line in newest(files, 3, sizes)] == ["postgres", "gateway", "worker"]


def test_a_line_that_is_written_meanwhile_is_only_a_new_one(data: Path) -> None:
    path = data / "logs" / "gateway.log"
    size = path.stat().st_size
    tail = Tail("gateway", path, size)
    with path.open("a") as file:
        file.write(f"{written(6, 'sixth')}\n")
    old = newest({"gateway": path}, 100, {"gateway": size})
    assert [json.loads(line.text)["event"] for line in old] == ["first", "fourth"]
    assert [json.loads(text)["event"] for text in tail.read()] == ["sixth"]
    assert newest({"gateway": path}, 100, {"gateway": 0}) == []


@pytest.mark.parametrize(
    "text",
    [
        written(3.5, "x"),
        "2026-11-23 13:00:03.500 UTC [12] LOG:  x",
        "2026-11-23 13:00:03.500 GMT [12] LOG:  x",
    ],
)
def test_times_are_those_of_the_lines(text: str) -> None:
    assert time_of(text) == 1795438803.5


@pytest.mark.parametrize(
    "text", ["[7] 2026/11/23 13:00:03.500000 [INF] x", "7:M 23 Nov 2026 13:00:03.500 * x"]
)
def test_servers_without_a_time_zone_log_local_time(text: str) -> None:
    found = time_of(text)
    assert found is not None
    # Time zones differ by quarters of an hour.
    assert (found - 1795438803.5) % 900 == 0
    assert time_of("no time") is None


def test_down_without_a_stack_says_so(tmp_path: Path) -> None:
    done = RUNNER.invoke(app, ["down", "--data", str(tmp_path)])
    assert done.exit_code == 1
    assert "no stack is running" in done.stderr


# Where the tests run in the background of a script, SIGINT is ignored, and children inherit that.
WAITING = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A living process whose id the record and the lock of `tmp_path` name."""
    process = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    values = {f"{name}_url": "http://127.0.0.1:1" for name in ("nats", "redis", "postgres")}
    stack = {"version": record.VERSION, "url": "http://127.0.0.1:1", **values, "data": str(tmp_path)}
    stack |= {"supervisor_pid": process.pid, "processes": {}, "ready": True}
    (tmp_path / "stack.json").write_text(json.dumps(stack))
    (tmp_path / "up.lock").write_text(f"{process.pid}\n")
    yield process
    process.kill()
    process.wait()


def test_down_signals_no_process_that_got_the_id_of_a_killed_stack(
    tmp_path: Path, recorded: subprocess.Popen[bytes]
) -> None:
    done = RUNNER.invoke(app, ["down", "--data", str(tmp_path)])
    assert done.exit_code == 1
    assert "no stack is running" in done.stderr
    assert recorded.poll() is None
    (tmp_path / "up.lock").unlink()
    assert RUNNER.invoke(app, ["down", "--data", str(tmp_path)]).exit_code == 1
    assert recorded.poll() is None


def test_down_signals_only_the_process_that_holds_the_lock(
    tmp_path: Path, recorded: subprocess.Popen[bytes]
) -> None:
    lock = tmp_path / "up.lock"
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # The next stack has begun, and has not written its record yet.
        lock.write_text(f"{os.getpid()}\n")
        assert RUNNER.invoke(app, ["down", "--data", str(tmp_path)]).exit_code == 1
        assert recorded.poll() is None
        lock.write_text(f"{recorded.pid}\n")
        done = RUNNER.invoke(app, ["down", "--data", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert recorded.wait() == -signal.SIGINT

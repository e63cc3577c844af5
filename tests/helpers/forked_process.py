"""Service processes that a fork server starts: they skip the imports, most of what a start costs.

A fork is a process of its own in every other respect: id, environment, output, signals, exit status, atexit
handlers, threads. /proc shows its own command line and environment. It does not read OMP_NUM_THREADS and
other variables that only a new process reads.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from tests.helpers import prepared_cluster, shown_process
from tests.helpers.forked_launches import LOADERS, request, send_job
from turboserve.cli.stack.background import BackgroundStack

ROOT = Path(__file__).parents[2]
LOST = -int(signal.SIGKILL)
"""Exit status of a process whose server has ended."""


@dataclass
class Server:
    """A fork server."""

    connection: socket.socket
    pid: int


_starting = threading.Lock()
_servers: dict[int, Server] = {}
"""Process id → its server: a fork of this process has a server of its own."""
_shared: Server | None = None
"""The server whose forks are the servers of this process's forks."""


class ForkedProcess:
    """As `subprocess.Popen`, for a process of the fork server."""

    def __init__(self, pipe: int) -> None:
        """`pipe`: here the server writes the process id, and later the exit status; each in a line."""
        self.returncode: int | None = None
        self._pipe, self._read = pipe, b""
        if not self._until_lines(1, None):
            raise ChildProcessError("the fork server has ended")
        self.pid = int(self._read.split(b"\n")[0])

    def poll(self) -> int | None:
        if self.returncode is None and self._until_lines(2, 0.0):
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            if not self._until_lines(2, timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._end()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _until_lines(self, count: int, limit_s: float | None) -> bool:
        """Read until there are `count` lines, or the server has ended. Returns whether that is so in time."""
        until = None if limit_s is None else time.monotonic() + limit_s
        while self._read.count(b"\n") < count:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._pipe], [], [], left)[0]:
                return False
            data = os.read(self._pipe, 64)
            if not data:
                return count > 1
            self._read += data
        return True

    def _end(self) -> None:
        lines = self._read.split(b"\n")
        self.returncode = int(lines[1]) if lines[1:2] and lines[1] else LOST
        os.close(self._pipe)


Started = ForkedProcess | subprocess.Popen[bytes]


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: int,
    *,
    stdout: int | None = None,
    new_session: bool = False,
    descriptors: int | None = None,
    forked: bool = True,
    starts: bool = False,
) -> Started:
    """Start `python -m MODULE` or `python FILE ARGUMENTS`; `command` is what follows `python`.

    `output` is the descriptor for stderr, and for stdout without `stdout`. `new_session`: the process leads
    a session. `descriptors` limits its open files. `starts`: the program's own `python` processes are forks,
    too. Without `forked`, with variables that only a new interpreter reads, and under `make coverage`, which
    counts a process from its start, this is an ordinary `subprocess.Popen`.
    """
    stdout = output if stdout is None else stdout
    loads = any(environment.get(name) != os.environ.get(name) for name in LOADERS)
    if loads or not forked or _is_covered():
        return _ordinary(command, environment, output, stdout, new_session, descriptors)
    return ForkedProcess(
        request(
            _server(),
            command,
            environment,
            {1: stdout, 2: output},
            new_session=new_session,
            limit=descriptors,
            starts=starts,
        )
    )


def run(
    command: Sequence[str], environment: Mapping[str, str] = os.environ, limit_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Start a process as `start` does, and wait for its end. Raises subprocess.TimeoutExpired."""
    with TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
        process = start(command, environment, stderr.fileno(), stdout=stdout.fileno())
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess([*command], status, stdout.read(), stderr.read())


def start_stack(
    command: Sequence[str], *, stdin: int, stdout: IO[bytes], stderr: int, env: Mapping[str, str]
) -> Started:
    """As `subprocess.Popen`, for `turboserve up`, whose services are forks, too."""
    if command[0] != sys.executable:
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=env)
    if "--data" in command:
        prepared_cluster.copy_cluster_to(Path(command[command.index("--data") + 1]))
    return start(command[1:], env, stdout.fileno(), starts=True)


class InterpretedStack(BackgroundStack):
    """A stack each of whose processes is a new interpreter, as in production."""

    launch = subprocess.Popen


def server_id() -> int | None:
    """Return the process id of this process's server, if it has one: the parent of what `start` starts."""
    server = _servers.get(os.getpid())
    return None if server is None else server.pid


def share_imports() -> None:
    """Start a server whose imports are shared by the servers of all later forks of this process.

    Under `make coverage`, which forks nothing from a server, this does nothing.
    """
    global _shared
    if not _is_covered():
        _shared = new_server()


def _server() -> socket.socket:
    own = os.getpid()
    with _starting:
        if own not in _servers:
            _servers[own] = new_server() if _shared is None else forked_server(_shared)
    return _servers[own].connection


def new_server() -> Server:
    """Start a server in a new interpreter."""
    here, there = _connection()
    space = " " * shown_process.SPACE
    # Its output is this process's own. It ends with this process, which closes the connection.
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.fork_server", str(there.fileno()), space],
        cwd=ROOT,
        env={**os.environ, shown_process.SPACE_VARIABLE: space},
        stdin=subprocess.DEVNULL,
        pass_fds=[there.fileno()],
        start_new_session=True,
    )
    there.close()
    return Server(here, process.pid)


def forked_server(shared: Server) -> Server:
    """Let a server fork a further one, which keeps its imports."""
    here, there = _connection()
    with there:
        pipe = send_job(shared.connection, None, [there.fileno(), 1, 2])
    line = os.read(pipe, 64)
    os.close(pipe)
    if not line:
        raise ChildProcessError("the fork server has ended")
    # A second line follows if the fork has already ended.
    return Server(here, int(line.split(b"\n")[0]))


def _is_covered() -> bool:
    return "COVERAGE_PROCESS_CONFIG" in os.environ


def _connection() -> tuple[socket.socket, socket.socket]:
    # One message is one job, also when several threads send.
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _ordinary(
    command: Sequence[str],
    environment: Mapping[str, str],
    stderr: int,
    stdout: int,
    new_session: bool,
    descriptors: int | None,
) -> subprocess.Popen[bytes]:
    limit = [] if descriptors is None else ["prlimit", f"--nofile={descriptors}:{descriptors}", "--"]
    return subprocess.Popen(
        [*limit, sys.executable, *command],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=new_session,
    )

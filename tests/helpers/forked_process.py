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
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.helpers import shown_process
from tests.helpers.forked_launches import LOADERS, request
from turboserve.cli.stack.background import BackgroundStack

ROOT = Path(__file__).parents[2]
LOST = -int(signal.SIGKILL)
"""Exit status of a process whose server has ended."""

_servers: dict[int, socket.socket] = {}
"""Process id → connection to its server: a fork of this process has a server of its own."""


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
    if loads or not forked or "COVERAGE_PROCESS_CONFIG" in os.environ:
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


def start_stack(
    command: Sequence[str], *, stdin: int, stdout: IO[bytes], stderr: int, env: Mapping[str, str]
) -> Started:
    """As `subprocess.Popen`, for `turboserve up`, whose services are forks, too."""
    if command[0] != sys.executable:
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=env)
    return start(command[1:], env, stdout.fileno(), starts=True)


class InterpretedStack(BackgroundStack):
    """A stack each of whose processes is a new interpreter, as in production."""

    launch = subprocess.Popen


def _server() -> socket.socket:
    if os.getpid() not in _servers:
        # One message is one job, also when several threads send.
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        space = " " * shown_process.SPACE
        # Its output is this process's own. It ends with this process, which closes the connection.
        subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fork_server", str(there.fileno()), space],
            cwd=ROOT,
            env={**os.environ, shown_process.SPACE_VARIABLE: space},
            stdin=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
            start_new_session=True,
        )
        there.close()
        _servers[os.getpid()] = here
    return _servers[os.getpid()]


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

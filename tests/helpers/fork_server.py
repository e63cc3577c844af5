"""The process from which tests fork services: `python -m tests.helpers.fork_server DESCRIPTOR SPACE`.

It has one thread and no event loop. What a program imports is imported here before its first fork.

It ends when the connection at DESCRIPTOR closes. Stacks that still run then get SIGINT, so that a killed
pytest leaves none. Other processes go on, as children of a test's process would.

A request without a job is for a further server: a fork with a connection of its own, so that several
processes of tests share the imports. SPACE, and a variable of the environment, are room in which a fork shows
its own command line and environment: see `shown_process.py`.
"""

from __future__ import annotations

import ast
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import Any

from tests.helpers import shown_process
from tests.helpers.forked_end import run_to_end
from tests.helpers.forked_launches import Launcher

HIGHEST_DESCRIPTOR = 4096
LONGEST_JOB = 200_000
MOST_DESCRIPTORS = 16
OF_STACKS = (
    "turboserve.cli.stack.run",
    *(f"turboserve.{name}.__main__" for name in ("gateway", "recorder", "scheduler", "state_store")),
    *(f"turboserve.{name}.__main__" for name in ("autoscaler", "worker")),
)
"""Modules of every stack."""
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Job:
    """A program to run, with descriptors that it gets."""

    command: list[str]
    environment: dict[str, str]
    directory: str
    new_session: bool
    descriptors: int | None
    """Limit of open files."""
    starts: bool
    """Whether the program's own `python` processes are forks, too: a stack."""
    umask: int
    targets: list[int]
    """The numbers that `received` get: first stdout and stderr."""
    received: list[int]

    def run(self) -> None:
        """Become the program, in a fresh fork."""
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Before the process leads a session: who looks for session leaders reads their environments.
        shown_process.show([sys.executable, *self.command], self.environment)
        if self.new_session:
            os.setsid()
        self._take_descriptors()
        launcher = self._launcher() if self.starts else None
        if self.descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.descriptors, self.descriptors))
        os.chdir(self.directory)
        os.umask(self.umask)
        os.environ.clear()
        os.environ.update(self.environment)
        gc.enable()
        if launcher is not None:
            subprocess.Popen = launcher  # type: ignore[misc, assignment]
        is_module = self.command[0] == "-m"
        sys.path[0] = self.directory if is_module else str(Path(self.command[0]).parent)
        # As a new interpreter does: before the folders of the installation.
        given = self.environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [folder for folder in given if folder and folder not in sys.path]
        if is_module:
            sys.argv = ["-m", *self.command[2:]]
            runpy.run_module(self.command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(self.command)
            runpy.run_path(self.command[0], run_name="__main__")

    def _take_descriptors(self) -> None:
        """Give what was received its numbers, and close everything else."""
        above = max([2, *self.targets, *self.received]) + 1
        moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in self.received]
        last = 2
        # Between the moved ones there may be others, which were in use.
        for kept in (*sorted(moved), HIGHEST_DESCRIPTOR):
            os.closerange(last + 1, kept)
            last = kept
        for descriptor, target in zip(moved, self.targets, strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)

    def _launcher(self) -> Launcher:
        """Fork a server for what the program starts: the program's process does not stay fit to be forked.

        A process whose parent ends becomes a child of the program's, as if that had started it.
        """
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            here.close()
            shown_process.show([sys.executable, "fork_server"], {})
            job = ForkServer(there, give_away=True).serve()
            if job is None:
                os._exit(0)
            run_to_end(job.run)
        there.close()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return Launcher(here)


class ForkServer:
    def __init__(self, connection: socket.socket, *, give_away: bool = False) -> None:
        """With `give_away`, forks become children of this process's parent, which gets their exit status."""
        self._connection = connection
        self._give_away = give_away
        self._pipes: dict[int, int] = {}
        """Process id of a child → the pipe for its exit status."""
        self._stacks: set[int] = set()
        """Process ids of the stacks that run."""
        self._imported: set[str] = set()

    def serve(self) -> Job | None:
        """Fork until the connection closes, then return None. In each fork, return its job."""
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        while True:
            watched = [self._connection.fileno(), wake_read]
            readable, _, _ = select(watched, [], [])
            if wake_read in readable:
                os.read(wake_read, 4096)
                self._reap()
            if self._connection.fileno() not in readable:
                continue
            data, descriptors, _, _ = socket.recv_fds(self._connection, LONGEST_JOB, MOST_DESCRIPTORS)
            if not data:
                for pid in self._stacks:
                    os.kill(pid, signal.SIGINT)
                return None
            pipe, *received = descriptors
            fields: dict[str, Any] | None = json.loads(data)
            if fields is None:
                if self._fork_server(pipe, received):
                    os.close(wake_read)
                    os.close(wake_write)
                    return self.serve()
                continue
            job = Job(**fields, received=received)
            if job.starts:
                self._import_stack()
            self._import(job.command)
            # Objects of now stay shared: the collector would write to each.
            gc.freeze()
            pid = self._fork(pipe)
            if pid == 0:
                signal.set_wakeup_fd(-1)
                return job
            for descriptor in received:
                os.close(descriptor)
            if self._give_away:
                os.close(pipe)
            else:
                self._pipes[pid] = pipe
                if job.starts:
                    self._stacks.add(pid)
                _write(pipe, pid)

    def _fork_server(self, pipe: int, received: list[int]) -> bool:
        """Fork a server for the connection `received[0]`, with the outputs after it.

        Returns whether this is the fork.
        """
        self._import_stack()
        gc.freeze()
        pid = os.fork()
        if pid:
            for descriptor in received:
                os.close(descriptor)
            self._pipes[pid] = pipe
            _write(pipe, pid)
            return False
        signal.set_wakeup_fd(-1)
        os.close(pipe)
        self._connection.close()
        while self._pipes:
            os.close(self._pipes.popitem()[1])
        self._stacks.clear()
        self._connection = socket.socket(fileno=received[0])
        for target, descriptor in zip((1, 2), received[1:], strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)
        return True

    def _import_stack(self) -> None:
        for module in OF_STACKS:
            self._import(["-m", module])

    def _fork(self, pipe: int) -> int:
        pid = os.fork()
        if not self._give_away:
            return pid
        if pid:
            os.waitpid(pid, 0)
            _write(pipe, 0)
            return pid
        parent = os.getpid()
        if pid := os.fork():
            _write(pipe, pid)
            os._exit(0)
        while os.getppid() == parent:
            time.sleep(0.0005)
        return 0

    def _import(self, command: list[str]) -> None:
        """Import a module, or what a file imports at its top level."""
        name = command[1] if command[0] == "-m" else command[0]
        if name in self._imported:
            return
        self._imported.add(name)
        # An error is raised again, and reported, in the fork.
        with suppress(Exception):
            if command[0] == "-m":
                main = name
                if hasattr(importlib.import_module(name), "__path__"):
                    main = f"{name}.__main__"
                    importlib.import_module(main)
                # A fork executes it again.
                del sys.modules[main]
            else:
                exec(_imports_of(Path(name)), {})

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._stacks.discard(pid)
                pipe = self._pipes.pop(pid)
                _write(pipe, os.waitstatus_to_exitcode(status))
                os.close(pipe)


def _imports_of(file: Path) -> Any:
    body = ast.parse(file.read_text()).body
    imports: list[ast.stmt] = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    return compile(ast.Module(imports, []), str(file), "exec")


def _write(pipe: int, number: int) -> None:
    # The client that started the process may have gone.
    with suppress(BrokenPipeError):
        os.write(pipe, f"{number}\n".encode())


if __name__ == "__main__":
    gc.disable()
    work = ForkServer(socket.socket(fileno=int(sys.argv[1]))).serve()
    if work is None:
        os._exit(0)
    run_to_end(work.run)

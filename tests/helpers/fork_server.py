"""The process from which tests fork services: `python -m tests.helpers.fork_server DESCRIPTOR`.

It has one thread and no event loop. What a program imports is imported here before its first fork. It ends
when the connection at DESCRIPTOR closes; processes that still run then go on, as children of a test's
process would.
"""

from __future__ import annotations

import ast
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import Any

HIGHEST_DESCRIPTOR = 4096


@dataclass
class Job:
    """A program to run, with the descriptors that become its stdout and stderr."""

    command: list[str]
    environment: dict[str, str]
    directory: str
    new_session: bool
    descriptors: int | None
    outputs: tuple[int, int]

    def run(self) -> None:
        """Become the program, in a fresh fork."""
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.new_session:
            os.setsid()
        for descriptor, output in enumerate(self.outputs, 1):
            os.dup2(output, descriptor)
        os.closerange(3, HIGHEST_DESCRIPTOR)
        if self.descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.descriptors, self.descriptors))
        os.chdir(self.directory)
        os.environ.clear()
        os.environ.update(self.environment)
        gc.enable()
        if self.command[0] == "-m":
            sys.argv = ["-m", *self.command[2:]]
            sys.path[0] = self.directory
            runpy.run_module(self.command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(self.command)
            sys.path[0] = str(Path(self.command[0]).parent)
            runpy.run_path(self.command[0], run_name="__main__")


class ForkServer:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pipes: dict[int, int] = {}
        """Process id of a child → the pipe for its exit status."""
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
            length, descriptors, _, _ = socket.recv_fds(self._connection, 4, 3)
            if not length:
                return None
            job, pipe = self._received(int.from_bytes(length, "big"), descriptors)
            self._import(job.command)
            # Objects of now stay shared: the collector would write to each.
            gc.freeze()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                return job
            for output in job.outputs:
                os.close(output)
            self._pipes[pid] = pipe
            _write(pipe, pid)

    def _received(self, length: int, descriptors: list[int]) -> tuple[Job, int]:
        data = b""
        while len(data) < length:
            part = self._connection.recv(length - len(data))
            assert part, "the connection closed within a job"
            data += part
        stdout, stderr, pipe = descriptors
        fields: dict[str, Any] = json.loads(data)
        return Job(**fields, outputs=(stdout, stderr)), pipe

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
    if work is not None:
        work.run()

"""Replaces `subprocess.Popen` in a forked program whose own `python` processes are to be forks, too."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

POLL_S = 0.01
FORKED = "turboserve.", "dummy_service"
"""Beginnings of the names of modules that are forked: services, and their stand-ins in tests/cli."""
STARTERS = frozenset({"turboserve.autoscaler"})
"""Modules that start further processes when a stack's supervisor has started them."""
KNOWN_OPTIONS = frozenset({"stdin", "stdout", "stderr", "env", "start_new_session", "pass_fds"})
NOT_GIVEN = (subprocess.PIPE, subprocess.DEVNULL, subprocess.STDOUT)
LOADERS = frozenset({"LD_PRELOAD"})
"""Variables that only a new process reads, and that tests set."""
_Popen = subprocess.Popen


class GivenChild:
    """As `subprocess.Popen`, for a process that has become a child of this one."""

    stdin = stdout = stderr = None

    def __init__(self, args: Sequence[str], pid: int) -> None:
        self.args, self.pid = args, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # Other code has collected the status, as with `subprocess.Popen`.
                self.returncode = 0
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Launcher:
    """Called as `subprocess.Popen`. What is no plain start of a service or of a file goes to the original."""

    def __init__(self, server: socket.socket) -> None:
        """`server` is the connection to the fork server that gives its forks to this process."""
        self._server = server
        self._sending = threading.Lock()

    def __getitem__(self, _kind: object) -> Launcher:
        return self

    def __call__(self, args: Any, **options: Any) -> Any:
        given = args, options
        args, options = _without_env(args, options)
        if not _is_plain(args, options):
            return _Popen(given[0], **given[1])
        stdout = _number(options.get("stdout"), 1)
        stderr = _number(options.get("stderr"), 2)
        fds = [*options.get("pass_fds", ())]
        with self._sending:
            pipe = request(
                self._server,
                [*args[1:]],
                os.environ if options.get("env") is None else options["env"],
                {1: stdout, 2: stderr, **{fd: fd for fd in fds}},
                new_session=options.get("start_new_session", False),
                starts=args[1] == "-m" and args[2] in STARTERS,
            )
            lines = b""
            # The second line follows when the process is a child of this one.
            while lines.count(b"\n") < 2:
                data = os.read(pipe, 64)
                if not data:
                    raise ChildProcessError("the fork server has ended")
                lines += data
        os.close(pipe)
        return GivenChild(args, int(lines.split(b"\n")[0]))


def request(
    server: socket.socket,
    command: Sequence[str],
    environment: Mapping[str, str],
    descriptors: Mapping[int, int],
    *,
    new_session: bool = False,
    limit: int | None = None,
    starts: bool = False,
) -> int:
    """Ask `server` for a process, and return the pipe to which the server writes its id.

    `descriptors`: number in the process → descriptor here. `limit` is that of open files. `starts`: whether
    the program's own `python` processes are forks, too.
    """
    job = {
        "command": [*command],
        "environment": dict(environment),
        "directory": str(Path.cwd()),
        "new_session": new_session,
        "descriptors": limit,
        "starts": starts,
        "umask": _umask(),
        "targets": [*descriptors],
    }
    return send_job(server, job, [*descriptors.values()])


def send_job(server: socket.socket, job: dict[str, Any] | None, descriptors: Sequence[int]) -> int:
    """Send a job, or None for a further server, with its descriptors. Returns as `request` does."""
    read, write = os.pipe()
    try:
        socket.send_fds(server, [json.dumps(job).encode()], [write, *descriptors])
    finally:
        os.close(write)
    return read


def _umask() -> int:
    # `os.umask` would change it for a moment, also for other threads.
    found = re.search(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1], 8)


def _without_env(args: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Take the words `env NAME=VALUE …` from a command, and add their variables to its environment."""
    if isinstance(args, str | bytes | os.PathLike) or args[0] != "env":
        return args, {**options}
    pairs = dict(word.split("=", 1) for word in takewhile(lambda word: "=" in word, args[1:]))
    before = os.environ if options.get("env") is None else options["env"]
    return [*args[1 + len(pairs) :]], {**options, "env": {**before, **pairs}}


def _is_plain(args: Any, options: Mapping[str, Any]) -> bool:
    if isinstance(args, str | bytes | os.PathLike) or not KNOWN_OPTIONS.issuperset(options):
        return False
    if len(args) < 2 or args[0] != sys.executable or LOADERS.intersection(options.get("env") or os.environ):
        return False
    if options.get("stdin") not in (None, subprocess.DEVNULL):
        return False
    if any(options.get(output) in NOT_GIVEN for output in ("stdout", "stderr")):
        return False
    module = args[2] if args[1] == "-m" and len(args) > 2 else ""
    return module.startswith(FORKED) or str(args[1]).endswith(".py")


def _number(output: Any, default: int) -> int:
    if output is None:
        return default
    return output if isinstance(output, int) else int(output.fileno())

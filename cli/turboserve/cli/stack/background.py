"""A whole stack as a child process, for tests and benchmarks that need their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Protocol

import psutil

from turboserve.cli.stack import record
from turboserve.cli.stack.record import StackNotRunningError, StackRecord
from turboserve.free_ports import any_free

START_LIMIT_S = 180.0
STOP_LIMIT_S = 60.0
UP = (sys.executable, "-m", "turboserve.cli.main", "up")


class StackStartError(Exception):
    """`turboserve up` ended or hung. The message has the end of its output."""


class SupervisorProcess(Protocol):
    """The part of `subprocess.Popen` by which a stack's supervisor is watched and ended."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status. Raises subprocess.TimeoutExpired after `timeout` s."""
        ...

    def send_signal(self, number: int, /) -> None:
        """Send a signal unless the process has ended."""
        ...

    def kill(self) -> None:
        """Send SIGKILL unless the process has ended."""
        ...


class BackgroundStack:
    """Runs `turboserve up` on the directory `data` from entry to exit. The output goes to the file `log`."""

    launch: ClassVar[Callable[..., SupervisorProcess]] = subprocess.Popen
    """Starts the supervisor's process, with arguments of `subprocess.Popen`."""

    def __init__(
        self,
        data: Path,
        *options: str,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = UP,
    ) -> None:
        self.data = data
        self.log = data.with_name(f"{data.name}.log")
        self._command = [*command, "--data", str(data), *options]
        self._environment = {**os.environ, **(environment or {})}
        self._process: SupervisorProcess | None = None

    def __enter__(self) -> BackgroundStack:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def record(self) -> StackRecord:
        """The current contents of stack.json."""
        return record.read(self.data)

    @property
    def url(self) -> str:
        return self.record.url

    @property
    def output(self) -> str:
        """All output of the stack so far."""
        return self.log.read_text(errors="replace")

    @property
    def process(self) -> SupervisorProcess:
        """The process of the supervisor."""
        assert self._process is not None, "the stack has not been started"
        return self._process

    def start(self) -> None:
        """Start the stack, and wait until everything is ready. Raises StackStartError."""
        # Not the default port: several stacks that start at the same time would all find it free.
        port = [] if "--port" in self._command else ["--port", str(any_free())]
        with self.log.open("ab") as output:
            self._process = type(self).launch(
                [*self._command, *port],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )
        try:
            self.wait(self._is_ready, START_LIMIT_S)
        except TimeoutError:
            self.stop()
            raise StackStartError(self.output[-4000:]) from None

    def stop(self) -> int:
        """Stop the stack as Ctrl-C does, and return its exit status."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def kill(self, name: str) -> int:
        """Kill the service or server `name` (`worker`: the first one), and return its process id."""
        pid = self.record.worker_pids()[0] if name == "worker" else self.record.pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_until_back(self, name: str, killed_pid: int, limit_s: float = 60.0) -> int:
        """Wait until `name` is ready again as another process. Returns the new process id."""

        def back() -> bool:
            described = self.record.processes[name]
            return described["state"] == "ready" and described["pid"] not in (None, killed_pid)

        self.wait(back, limit_s)
        return self.record.pid(name)

    def descendants(self) -> list[psutil.Process]:
        """Return all living processes below the supervisor."""
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def wait(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Poll until `condition` holds. Raises TimeoutError with the end of the output."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"not reached after {limit_s:.0f} s; output of the stack:\n{self.output[-4000:]}"
                )
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise StackStartError(self.output[-4000:])
        try:
            return self.record.ready
        except StackNotRunningError:
            return False

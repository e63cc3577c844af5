"""Workers and the state store as processes of a test."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from tests.helpers import forked_process

TINY_WORKER = Path(__file__).with_name("tiny_worker.py")


class Pool:
    """Worker processes, kept from test to test: starting one takes longer than most tests."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.processes: dict[str, forked_process.Started] = {}
        self.health: dict[str, int] = {}
        self.free: set[str] = set()

    def idle(self) -> str | None:
        return self.free.pop() if self.free else None

    def start(
        self,
        worker: str,
        health_port: int,
        environment: dict[str, str],
        command: Sequence[str] = (str(TINY_WORKER),),
    ) -> None:
        """Start a worker. `command`: what follows `python`."""
        self.health[worker] = health_port
        own = {"TURBOSERVE_WORKER_ID": worker, "TURBOSERVE_HEALTH_PORT": str(health_port)}
        given = {"TURBOSERVE_WORKER_MAX_SESSIONS": "2"} | environment | own
        with self.log(worker).open("ab") as log:
            self.processes[worker] = forked_process.start(command, given, log.fileno())

    def kill(self, worker: str) -> None:
        process = self.processes[worker]
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()

    def log(self, worker: str) -> Path:
        return self.logs / f"{worker}.log"


class Store:
    """The state store's process."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self._environment, self.log = environment, log
        self.process = self.start()

    def start(self) -> forked_process.Started:
        command = ["-m", "turboserve.state_store"]
        with self.log.open("ab") as log:
            self.process = forked_process.start(command, self._environment, log.fileno())
        return self.process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

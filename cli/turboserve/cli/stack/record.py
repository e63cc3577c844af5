"""`stack.json`: the processes and URLs of a running stack, for `status`, benchmarks and tests."""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from turboserve.cli.embedded import Layout
from turboserve.cli.embedded.layout import write_private
from turboserve.cli.stack.plan import Plan

VERSION = 2
BLOCK_BYTES = 4096
SPARE_BYTES = 1024
"""Minimum of spaces at the end of the record. They let a later, longer record overwrite it on a full disk."""


class StackNotRunningError(Exception):
    """No stack runs on this data directory. Start one."""

    def __init__(self, data: Path) -> None:
        super().__init__(f"no stack is running on {data}: start one with `turboserve up` (or `make up`)")


@dataclass(frozen=True)
class StackRecord:
    """The contents of stack.json."""

    url: str
    nats_url: str
    redis_url: str
    postgres_url: str
    supervisor_pid: int
    data: str
    processes: dict[str, dict[str, Any]]
    """Name → kind, state, restarts, port, pid, alarm; for servers also guard_pid."""
    ready: bool
    """Whether everything has been ready once."""
    gateway_urls: tuple[str, ...] = ()
    """Addresses of all gateways. `url` is the first."""

    def pid(self, name: str) -> int:
        """Return the process id of a service, or of a server (not of its guard)."""
        pid = self.processes[name]["pid"]
        if pid is None:
            raise LookupError(f"{name} is not running: it is {self.processes[name]['state']}")
        return int(pid)

    def worker_pids(self) -> list[int]:
        """Return the process ids of all workers below the supervisor, lowest first. Decode workers, which are
        processes of the supervisor itself, are not among them."""
        found = []
        own = {process.get("pid") for process in self.processes.values()}
        for process in psutil.Process(self.supervisor_pid).children(recursive=True):
            try:
                if process.pid not in own and "turboserve.worker" in process.cmdline():
                    found.append(process.pid)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return sorted(found)


def write(plan: Plan, processes: dict[str, dict[str, Any]], ready: bool) -> None:
    """Write the record, readable only by its owner, since it contains passwords.

    On a full disk, the old record is overwritten in place, which needs no space. Raises OSError if that
    fails, too.
    """
    text = json.dumps(
        {
            "version": VERSION,
            "url": plan.url,
            "gateway_urls": plan.gateway_urls,
            "nats_url": plan.nats_url,
            "redis_url": plan.redis_url,
            "postgres_url": plan.postgres_url,
            "supervisor_pid": os.getpid(),
            "data": str(plan.layout.data),
            "processes": processes,
            "ready": ready,
        },
        indent=2,
    )
    blocks = -(-(len(text) + SPARE_BYTES) // BLOCK_BYTES)
    try:
        write_private(plan.layout.stack, text.ljust(blocks * BLOCK_BYTES - 1) + "\n")
    except OSError:
        size = plan.layout.stack.stat().st_size
        if len(text) > size:
            raise
        with plan.layout.stack.open("r+") as file:
            file.write(text.ljust(size))


def read(data: Path) -> StackRecord:
    """Return the record of the stack that runs on `data`.

    Raises StackNotRunningError if no stack runs, even if a killed stack left a record and another process
    has its process id now.
    """
    layout = Layout(data)
    value = _load(layout)
    if value.pop("version", None) != VERSION or not _runs(layout, value["supervisor_pid"]):
        raise StackNotRunningError(layout.data)
    return StackRecord(**value)


def _runs(layout: Layout, supervisor_pid: int) -> bool:
    """Return whether the supervisor with this process id holds the lock of the data directory."""
    # The lock is only tried where the process may run: a start at this moment would find it taken.
    if not psutil.pid_exists(supervisor_pid):
        return False
    try:
        with layout.lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() == str(supervisor_pid)
    except FileNotFoundError:
        pass
    return False


def _load(layout: Layout) -> dict[str, Any]:
    for pause_s in (0.01, 0.05, 0.0):
        try:
            value: dict[str, Any] = json.loads(layout.stack.read_text())
            return value
        except FileNotFoundError:
            break
        except json.JSONDecodeError:
            # On a full disk, the record is overwritten in place. A second read finds it complete.
            time.sleep(pause_s)
    raise StackNotRunningError(layout.data)

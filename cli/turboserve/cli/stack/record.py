"""`stack.json`: where a running stack is and how to reach it, for `status`, benchmarks and tests."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from turboserve.cli.embedded import Layout
from turboserve.cli.embedded.layout import write_private_json
from turboserve.cli.stack.plan import Plan

VERSION = 2


class NoStack(Exception):
    """No stack runs on this data directory."""

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
    """Name → kind, state, restarts, port, pid; for servers also guard_pid."""
    ready: bool
    """Everything has been ready once."""

    def pid(self, name: str) -> int:
        """The process id of a service, or of the server itself (not of its guard)."""
        pid = self.processes[name]["pid"]
        if pid is None:
            raise LookupError(f"{name} is not running: it is {self.processes[name]['state']}")
        return int(pid)

    def worker_pids(self) -> list[int]:
        """Worker processes below the supervisor, whoever started them; lowest first."""
        found = []
        for process in psutil.Process(self.supervisor_pid).children(recursive=True):
            try:
                if "turboserve.worker" in process.cmdline():
                    found.append(process.pid)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return sorted(found)


def write(plan: Plan, processes: dict[str, dict[str, Any]], ready: bool) -> None:
    """Write the record, readable by its owner only: it carries passwords."""
    write_private_json(
        plan.layout.stack,
        {
            "version": VERSION,
            "url": plan.url,
            "nats_url": plan.nats_url,
            "redis_url": plan.redis_url,
            "postgres_url": plan.postgres_url,
            "supervisor_pid": os.getpid(),
            "data": str(plan.layout.data),
            "processes": processes,
            "ready": ready,
        },
    )


def read(data: Path) -> StackRecord:
    """The record of the stack running on `data`. Raises NoStack, also for what a killed stack left behind."""
    layout = Layout(data)
    try:
        value = json.loads(layout.stack.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        raise NoStack(layout.data) from None
    if value.pop("version", None) != VERSION or not psutil.pid_exists(value["supervisor_pid"]):
        raise NoStack(layout.data)
    return StackRecord(**value)

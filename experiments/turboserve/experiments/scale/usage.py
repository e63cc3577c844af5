"""Processor time, waits for a processor, and memory of a stack's processes, by service."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

LOAD = "load"
"""Name of the processes that make the load: the benchmark with its clients, and the workers."""
WORKERS = "workers"
SUPERVISOR = "supervisor"
SERVERS = {"nats-server": "nats", "redis-server": "redis", "postgres": "postgres"}


class Usage:
    """Sums processor seconds, also of processes that have ended, and keeps each service's largest memory."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._rss: dict[str, int] = {}
        self._waits: dict[tuple[int, int], tuple[float, float]] = {}
        """Process and thread → seconds without a processor, by the first reading and the last."""

    def add(self, name: str | None, processes: Iterable[psutil.Process], *, begins: bool) -> None:
        """Read the processes now. `name`: their service, or None to find it by their commands.

        `begins`: processor time before this reading does not count.
        """
        now: dict[str, int] = defaultdict(int)
        for process in processes:
            try:
                with process.oneshot():
                    used, memory = process.cpu_times(), process.memory_info().rss
                    if process.pid not in self._names:
                        self._names[process.pid] = name or service_of(process.name(), process.cmdline())
            except psutil.Error:
                continue
            seconds = used.user + used.system
            # A process that starts later counts from its start.
            self._first.setdefault(process.pid, seconds if begins else 0.0)
            self._last[process.pid] = seconds
            now[self._names[process.pid]] += memory
            for thread, waited_s in waits(process.pid):
                first, _ = self._waits.get((process.pid, thread), (waited_s if begins else 0.0, 0.0))
                self._waits[process.pid, thread] = first, waited_s
        for service, memory in now.items():
            self._rss[service] = max(self._rss.get(service, 0), memory)

    def cpu_s(self) -> dict[str, float]:
        """Return the processor seconds since the first reading, by service."""
        found: dict[str, float] = defaultdict(float)
        for pid, last in self._last.items():
            found[self._names[pid]] += last - self._first[pid]
        return {name: round(seconds, 2) for name, seconds in sorted(found.items())}

    def waited_s(self) -> dict[str, float]:
        """Return the seconds since the first reading in which threads could run and had no processor."""
        found: dict[str, float] = defaultdict(float)
        for (pid, _), (first, last) in self._waits.items():
            found[self._names[pid]] += last - first
        return {name: round(seconds, 2) for name, seconds in sorted(found.items())}

    def rss_bytes(self) -> dict[str, int]:
        """Return the largest resident memory, by service. Memory that processes share counts in each."""
        return dict(sorted(self._rss.items()))


def waits(pid: int) -> Iterator[tuple[int, float]]:
    """Yield the threads of a process, and the seconds that each has waited for a processor, on Linux."""
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):
            yield int(thread.parent.name), int(thread.read_text().split()[1]) / 1e9


def service_of(program: str, command: list[str]) -> str:
    """Return the service that a process of the stack belongs to."""
    for server, name in SERVERS.items():
        if program.startswith(server):
            return name
    for argument in command:
        if argument.startswith("turboserve."):
            found = argument.removeprefix("turboserve.").partition(".")[0]
            return SUPERVISOR if found == "cli" else found.replace("_", "-")
    return SUPERVISOR

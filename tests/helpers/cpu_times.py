"""CPU time of each test file, with the processes that its tests start: `make test` loads this plugin.

Wall time depends on what else the machine does; CPU time depends on it much less. A process that several
files share counts for the file that runs while it computes. A process whose parent has ended before it counts
for no file, nor do the imports that the servers of forks share. With `TURBOSERVE_CPU_TIMES=PATH`, the report
has every file, and every test's figures are written to PATH: a line of JSON with its id, and CPU and wall
seconds, without processes that still run.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

from tests.helpers import forked_process
from tests.helpers.forked_groups import OUTPUTS

SHOWN = 20
"""Number of files in the report."""
TARGET = os.environ.get("TURBOSERVE_CPU_TIMES")
"""Read before `conftest.py` removes the product's variables."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
FIRST_TIME = 11
"""Place, in /proc/PID/stat behind the name, of user time. System time and those of children follow."""


def own_s() -> float:
    """Return the CPU seconds of this process and of the descendants that it and they have waited for."""
    spent = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def running_s() -> float:
    """Return the CPU seconds of descendants and forks that run, and of what they have waited for."""
    spent: dict[int, int] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            # A process may end meanwhile.
            with suppress(OSError):
                fields = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
                spent[int(entry.name)] = sum(map(int, fields[FIRST_TIME:][:4]))
                children[int(fields[1])].append(int(entry.name))
    found = [*children[os.getpid()]]
    if (server := forked_process.server_id()) is not None:
        # A fork of another process than this one.
        found.append(server)
    for pid in found:
        found.extend(children[pid])
    return sum(spent.get(pid, 0) for pid in {*found}) / TICKS_PER_S


class CpuTimes:
    """Measures the tests of this process. The process that forked others collects what they measured."""

    def __init__(self) -> None:
        self.files: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        """File → its CPU seconds and its wall seconds, for which it occupied a process."""
        self._before = 0.0
        """CPU seconds of all processes at the last change of files."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        cpu, wall = own_s(), time.monotonic()
        file = item.nodeid.split("::", 1)[0]
        try:
            return (yield)
        finally:
            wall = time.monotonic() - wall
            self.files[file][1] += wall
            if TARGET:
                with Path(TARGET).open("a") as lines:
                    figures = own_s() - cpu, wall
                    lines.write(json.dumps([item.nodeid, *(round(each, 3) for each in figures)]) + "\n")
            # Looking at every process takes some milliseconds, so it is done once a file.
            if nextitem is None or nextitem.nodeid.split("::", 1)[0] != file:
                now = own_s() + running_s()
                self.files[file][0] += max(0.0, now - self._before)
                self._before = now

    def pytest_collection_finish(self) -> None:
        self._before = own_s() + running_s()

    @pytest.hookimpl(optionalhook=True)
    def pytest_group_process_started(self) -> None:
        self._before = own_s()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_times"] = dict(self.files)

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        for output in terminalreporter.config.stash.get(OUTPUTS, []):
            for file, (cpu, wall) in output.get("cpu_times", {}).items():
                self.files[file][0] += cpu
                self.files[file][1] += wall
        total = sum(cpu for cpu, _ in self.files.values())
        terminalreporter.section(f"{total:.0f} s of CPU time in {len(self.files)} files; the most in")
        dearest = sorted(self.files.items(), key=lambda row: -row[1][0])
        for file, (cpu, wall) in dearest[: None if TARGET else SHOWN]:
            terminalreporter.write_line(f"CPU {cpu:6.1f} s, wall {wall:6.1f} s  {file}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuTimes())

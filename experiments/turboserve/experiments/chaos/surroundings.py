"""The environment of a stack under faults: its disk, its services' clock, its gateway's descriptors."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from turboserve.cli.stack.options import MODULES
from turboserve.experiments.chaos import slow_disk, small_disk
from turboserve.experiments.chaos.degradations import SLOW_DISKS
from turboserve.experiments.chaos.plan import FaultGroup
from turboserve.experiments.chaos.slow_disk import SlowDisk
from turboserve.experiments.chaos.small_disk import SmallDisk
from turboserve.experiments.chaos.stack_network import StackNetwork
from turboserve.experiments.chaos.up import PREFIXES

DISK_BYTES = 768 * 2**20
MEMORY_BYTES = 3 * DISK_BYTES
"""Free memory that the disk needs, because it is a tmpfs."""
GATEWAY_DESCRIPTORS = 256
FAKETIME_LIBRARIES = ("*/faketime/libfaketime.so.1", "faketime/libfaketime.so.1")


class FakeClock:
    """The wall clock of every process started with `command`; the monotonic clock is the machine's."""

    def __init__(self, library: Path, file: Path) -> None:
        self._library, self._file = library, file
        self.step(0.0)

    def step(self, seconds: float) -> None:
        """Set the clock `seconds` ahead of the machine's. Processes see the change within a second."""
        new = self._file.with_name(f"{self._file.name}.new")
        new.write_text(f"{seconds:+.0f}\n")
        new.replace(self._file)

    def command(self) -> list[str]:
        """Return the words to put before a command."""
        return [
            *("env", f"LD_PRELOAD={self._library}", f"FAKETIME_TIMESTAMP_FILE={self._file}"),
            *("FAKETIME_CACHE_DURATION=1", "FAKETIME_DONT_FAKE_MONOTONIC=1", "DONT_FAKE_MONOTONIC=1"),
        ]


@dataclass
class Surroundings:
    """The environment of one run. The stack keeps its data in `data`."""

    data: Path
    disk: SmallDisk | None = None
    clock: FakeClock | None = None
    gateway_descriptors: int | None = None
    network: StackNetwork | None = None
    slow_disks: dict[str, SlowDisk] = field(default_factory=dict)
    """Server or service → its disk, where it can be slow."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the stack."""


def faketime_library() -> Path | None:
    """Find libfaketime as Debian's package of that name installs it."""
    found = (path for pattern in FAKETIME_LIBRARIES for path in sorted(Path("/usr/lib").glob(pattern)))
    return next(found, None)


def left_out(groups: Iterable[FaultGroup]) -> dict[FaultGroup, str]:
    """Return which of `groups` are not possible on this machine, and why."""
    reasons: dict[FaultGroup, str] = {}
    for group in groups:
        reason = None
        if group is FaultGroup.DISK_FULL:
            reason = small_disk.why_not()
            if reason is None and psutil.virtual_memory().available < MEMORY_BYTES:
                reason = f"the tmpfs needs {MEMORY_BYTES / 2**30:.1f} GiB of free memory"
        elif group is FaultGroup.CLOCK_STEP and faketime_library() is None:
            reason = "libfaketime is not installed (Debian's package libfaketime)"
        elif group is FaultGroup.SLOW_DISK:
            reason = slow_disk.why_not()
        elif group is FaultGroup.DESCRIPTORS and shutil.which("prlimit") is None:
            reason = "prlimit is not installed (util-linux)"
        if reason is not None:
            reasons[group] = reason
    return reasons


@contextmanager
def prepared(
    groups: Iterable[FaultGroup], folder: Path, data: Path, seed: int = 0, *, redundancy: bool = False
) -> Iterator[Surroundings]:
    """Prepare a run with faults of `groups`; `folder` is for its own files, `data` for the stack's.

    With a full-disk fault, the stack keeps its data on a disk of its own, and its logs are copied to `data`
    at the end.
    """
    wanted = set(groups)
    prefixes: dict[str, list[str]] = {}
    worker: list[str] = []
    found = Surroundings(data)
    with ExitStack() as stack:
        if FaultGroup.DISK_FULL in wanted:
            found.disk = stack.enter_context(SmallDisk(folder / "disk", DISK_BYTES))
            found.data = found.disk.path / "data"
            stack.callback(_keep_logs, found.data, data)
        library = faketime_library()
        if FaultGroup.CLOCK_STEP in wanted and library is not None:
            found.clock = FakeClock(library, folder / "clock")
            prefixes = {service: found.clock.command() for service in MODULES}
            worker = found.clock.command()
        if wanted & {FaultGroup.SLOW_NETWORK, FaultGroup.BEHIND}:
            network = StackNetwork(found.data, seed, redundancy=redundancy)
            found.network = stack.enter_context(network)
            # A second process has the words of its service as well.
            prefixes = {
                name: [*words, *prefixes.get(name.removesuffix("-2"), [])]
                for name, words in network.prefixes.items()
            }
            worker = [*network.worker_prefix, *worker]
        if FaultGroup.SLOW_DISK in wanted:
            for name in SLOW_DISKS:
                disk = found.slow_disks[name] = stack.enter_context(SlowDisk())
                prefixes[name] = [*disk.command(), *prefixes.get(name, [])]
        if FaultGroup.DESCRIPTORS in wanted:
            found.gateway_descriptors = limit = GATEWAY_DESCRIPTORS
            prefixes["gateway"] = ["prlimit", f"--nofile={limit}:{limit}", *prefixes.get("gateway", [])]
        if worker:
            command = [*worker, sys.executable, "-m", "turboserve.worker"]
            found.environment["TURBOSERVE_POOL_WORKER_COMMAND"] = json.dumps(command)
        found.environment[PREFIXES] = json.dumps(prefixes)
        yield found


def _keep_logs(data: Path, kept: Path) -> None:
    if (data / "logs").is_dir():
        shutil.copytree(data / "logs", kept / "logs", dirs_exist_ok=True)

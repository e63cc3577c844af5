"""A slow disk delays the operations of the programs that it was made for, and of no others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from turboserve.experiments.chaos import slow_disk
from turboserve.experiments.chaos.slow_disk import FAST, DiskConditions, SlowDisk

pytestmark = pytest.mark.skipif(slow_disk.why_not() is not None, reason=str(slow_disk.why_not()))

PROGRAM = """
import os, sys, time
file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
for line in sys.stdin:
    times = [time.monotonic()]
    for work in (
        lambda: os.pwrite(file, line.encode(), 0),
        lambda: os.fsync(file),
        lambda: os.rename(sys.argv[1], sys.argv[1]),
    ):
        work()
        times.append(time.monotonic())
    print(*(after - before for before, after in zip(times, times[1:])), flush=True)
"""


@pytest.fixture
def disk() -> Iterator[SlowDisk]:
    with SlowDisk() as disk:
        yield disk


def started(disk: SlowDisk, file: Path) -> subprocess.Popen[str]:
    # A shell in between: what a program starts has the same disk.
    command = ["sh", "-c", '"$0" "$@"; exit $?', sys.executable, "-c", PROGRAM, str(file)]
    return subprocess.Popen(
        [*disk.command(), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def times(program: subprocess.Popen[str], text: str) -> list[float]:
    """Return how long the program's write, sync and rename took, seconds."""
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(f"{text}\n")
    return [float(part) for part in program.stdout.readline().split()]


def test_each_operation_waits_while_the_disk_is_slow(disk: SlowDisk, tmp_path: Path) -> None:
    with started(disk, tmp_path / "file") as program:
        times(program, "fast")
        assert disk.operations == 0
        disk.conditions = DiskConditions(write_s=0.1, sync_s=0.3)
        write_s, sync_s, rename_s = times(program, "slow")
        assert write_s >= 0.1
        assert min(sync_s, rename_s) >= 0.3
        disk.conditions = FAST
        times(program, "fast")
        assert disk.operations == 3
    assert program.returncode == 0
    assert (tmp_path / "file").read_text().startswith("fast")


def test_a_program_that_is_killed_in_a_slow_write_leaves_the_others_alone(
    disk: SlowDisk, tmp_path: Path
) -> None:
    with started(disk, tmp_path / "a") as killed, started(disk, tmp_path / "b") as other:
        times(other, "x")
        disk.conditions = DiskConditions(sync_s=0.2)
        assert killed.stdin is not None
        killed.stdin.write("x\n")
        killed.kill()
        assert times(other, "y")[1] >= 0.2

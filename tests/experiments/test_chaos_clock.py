"""The stepped clock applies to processes of a stack, and to no other process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from turboserve.experiments.chaos.surroundings import FakeClock, faketime_library

LIBRARY = faketime_library()
TELL = "import sys, time\nfor _ in sys.stdin:\n    print(time.time(), time.monotonic(), flush=True)"
RETRY_TIMEOUT_S = 30.0


@pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed (Debian's package libfaketime)")
def test_the_wall_clock_steps_in_a_process_that_runs_and_the_monotonic_one_does_not(tmp_path: Path) -> None:
    assert LIBRARY is not None
    clock = FakeClock(LIBRARY, tmp_path / "clock")
    process = subprocess.Popen(
        [*clock.command(), sys.executable, "-c", TELL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin:
        for step_s in (0.0, 3600.0, -3600.0, 0.0):
            clock.step(step_s)
            deadline_s = time.monotonic() + RETRY_TIMEOUT_S
            while True:
                process.stdin.write("\n")
                wall, monotonic = map(float, process.stdout.readline().split())
                assert abs(monotonic - time.monotonic()) < RETRY_TIMEOUT_S
                if abs(wall - time.time() - step_s) < RETRY_TIMEOUT_S:
                    break
                assert time.monotonic() < deadline_s
                time.sleep(0.05)

"""The plugin that measures coverage in `make test`, in a run of its own."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from coverage import CoverageData

from tests.helpers.sampled_coverage import BUDGET_S, ROOT, TRACED_PARAMETERS
from turboserve import ids

MODULE = Path(inspect.getfile(ids))
TESTS = f"""
import time
import pytest
from turboserve import ids

def test_that_spends_what_the_first_test_of_a_process_costs():
    pass

def test_within_the_budget():
    ids.new_id("ses")

def test_beyond_the_budget():
    # Most of it is user time, of which the budget is.
    end = time.process_time() + {20 * BUDGET_S}
    while time.process_time() < end:
        sum(range(10_000))
    ids.random_bits(8)

@pytest.mark.parametrize("number", range({TRACED_PARAMETERS + 1}))
def test_with_parameters(number):
    if number == {TRACED_PARAMETERS}:
        ids.random_bits(8)
"""


def body(function: Callable[..., object]) -> set[int]:
    """Return the lines of a function without its first line, which its import executes."""
    lines, first = inspect.getsourcelines(function)
    return set(range(first + 1, first + len(lines)))


def test_each_test_is_traced_until_its_budget_is_spent_and_the_first_parameters_only(tmp_path: Path) -> None:
    file = tmp_path / "test_two.py"
    file.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.helpers.sampled_coverage", "--noconftest"]
    environment = {**os.environ, "COVERAGE_FILE": str(tmp_path / "data")}
    # The outer run may be measured, too.
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    done = subprocess.run(
        [*command, str(file)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    [written] = tmp_path.glob("data.*")
    data = CoverageData(str(written))
    data.read()
    assert data.has_arcs()
    executed = set(data.lines(str(MODULE)) or ())
    assert executed & body(ids.new_id)
    assert not executed & body(ids.random_bits)
    # Modules that no test imports count, too.
    assert {file for file in data.measured_files() if file.endswith("bench/engine/whole.py")}

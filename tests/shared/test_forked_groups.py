"""The plugin that runs groups in forked processes, in runs of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
import pytest
from tests.helpers.forked_groups import GroupHooks, GroupRunner

def pytest_addhooks(pluginmanager):
    pluginmanager.add_hookspecs(GroupHooks)

def pytest_configure(config):
    config.pluginmanager.register(GroupRunner(2, lambda nodeid: nodeid.split("::")[0]))

@pytest.fixture(scope="session")
def once(tmp_path_factory):
    print("begins", flush=True)
    yield tmp_path_factory.mktemp("once")
    (tmp_path_factory.getbasetemp().parent / "ended.txt").open("a").write("session\\n")
"""
LATE = """
import os, time
from pathlib import Path

class Runner(GroupRunner):
    def _stop(self):
        # Each process ends before its last messages are read.
        super()._stop()
        for each in self._running:
            each.process.join(120)

GroupRunner = Runner
FAILED = Path(os.environ["MARK"]).with_name("failed")

def pytest_runtest_logreport(report):
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        FAILED.touch()

def pytest_group_process_started():
    deadline = time.monotonic() + 120
    while os.environ["PYTEST_XDIST_WORKER"] == "gw1" and not FAILED.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
"""
"""The second process begins when the first test has failed."""
FIRST = """
import os, time, warnings
from pathlib import Path

def test_passes(once, tmp_path):
    # Else this process could run both files before the other one begins.
    mark = Path(os.environ["MARK"])
    deadline = time.monotonic() + 120
    while not (mark.exists() or mark.with_name("beside").exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert once.parent.name == tmp_path.parent.name in ("gw0", "gw1")
    warnings.warn("of a process")

def test_fails(once):
    print("printed by the failing test")
    assert 1 + 1 == 3

def test_dies():
    os._exit(7)

def test_after_the_death(once):
    Path(os.environ["MARK"]).touch()
"""
SECOND = """
import os, time
from pathlib import Path

import pytest

@pytest.fixture(scope="module", autouse=True)
def module():
    yield
    Path(os.environ["MARK"]).with_name("module").touch()

@pytest.mark.parametrize("number", range(3))
def test_beside(number, once):
    # Only while another process runs the first file.
    Path(os.environ["MARK"]).with_name("beside").touch()
    deadline = time.monotonic() + 120
    while not Path(os.environ["MARK"]).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert Path(os.environ["MARK"]).exists()
"""


def run(directory: Path, *options: str, conftest: str = CONFTEST) -> str:
    """Run both files in two processes. Returns the output."""
    for name, text in (("conftest", conftest), ("test_first", FIRST), ("test_second", SECOND)):
        (directory / f"{name}.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"MARK": str(directory / "mark"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={directory / 'base'}"]
    command += [*options, str(directory)]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_files_run_side_by_side_and_a_death_fails_one_test(tmp_path: Path) -> None:
    output = run(tmp_path, "-v")
    assert "2 failed, 5 passed, 1 warning" in output, output
    assert "UserWarning: of a process" in output
    assert "assert (1 + 1) == 3" in output
    assert "printed by the failing test" in output
    assert "ended during this test with exit status 7" in output
    assert "[gw0]" in output
    assert "[gw1]" in output
    assert (tmp_path / "module").exists()
    # Session fixtures end in each process that ends by itself.
    assert (tmp_path / "base" / "ended.txt").read_text() == "session\n" * 2


def test_maxfail_stops_all_processes(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    output = run(tmp_path, "-x", conftest=CONFTEST + LATE)
    assert "stopping after 1 failures" in output
    assert "1 failed, 1 passed, 1 warning" in output, output


def test_the_groups_name_files_and_folders_that_exist(pytestconfig: pytest.Config) -> None:
    conftest: Any = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    named = {*conftest.ONE_STACK, *conftest.GROUPS, *conftest.LONG_FILES}
    assert {name for name in named if not (ROOT / name).exists()} == set()

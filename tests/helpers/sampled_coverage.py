"""Branch coverage of the tests' own processes at a bounded cost: `make test` loads this plugin.

Tracing makes Python code take two to three times as long. So each test is traced for the first `BUDGET_S` of
its CPU time only: a long test repeats the same code with other inputs. The figure is a lower bound. It lacks
what a test executes later, and what other processes execute (`make coverage` has both). Of a test with
parameters, each process traces the first `TRACED_PARAMETERS` only, for the same reason. Imports are traced
where the tests are collected.
"""

from __future__ import annotations

import signal
import tomllib
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import pytest
from coverage import Coverage

ROOT = Path(__file__).parents[2]
BUDGET_S = 0.01
"""User time of a test's process, in seconds, for which the test is traced."""
TRACED_PARAMETERS = 2
"""Number of parameters of one test that each process traces."""


class SampledCoverage:
    """Traces each test of this process for its first `BUDGET_S`."""

    def __init__(self) -> None:
        self._coverage = self._empty()
        self._running = False
        self._parameters: Counter[str] = Counter()
        """Name of a test without its parameters → how many of them have run."""

    def _empty(self) -> Coverage:
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage"]["run"]
        # Without the configuration's patches, which would measure processes that tests start.
        coverage = Coverage(
            data_suffix=True,
            config_file=False,
            branch=settings["branch"],
            source=[str(ROOT / name) for name in settings["source"]],
        )
        # Modules that no test imports count, too.
        coverage.set_option("report:include_namespace_packages", True)
        return coverage

    def start(self) -> None:
        if not self._running:
            self._running = True
            self._coverage.start()

    def stop(self) -> None:
        if self._running:
            self._running = False
            self._coverage.stop()

    def spent(self, _number: int, _frame: FrameType | None) -> None:
        """Stop when the budget is spent: the handler of SIGVTALRM."""
        self.stop()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if item.get_closest_marker("measures") is not None:
            # Tracing slows the first part of what is timed, and a running timer makes the clock of the
            # process's CPU time as coarse as the kernel's tick.
            return (yield)
        name, bracket, _ = item.nodeid.partition("[")
        self._parameters[name] += 1
        if bracket and self._parameters[name] > TRACED_PARAMETERS:
            return (yield)
        self.start()
        signal.setitimer(signal.ITIMER_VIRTUAL, BUDGET_S)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            self.stop()

    def pytest_collection_finish(self) -> None:
        self.stop()

    @pytest.hookimpl(optionalhook=True)
    def pytest_group_process_started(self) -> None:
        # The process that forked this one saves what was traced until now.
        self._coverage = self._empty()

    def pytest_sessionfinish(self) -> None:
        self.stop()
        self._coverage.save()


_sampled = SampledCoverage()
# Before `conftest.py` is imported, and most of the tree with it.
_sampled.start()


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGVTALRM, _sampled.spent)
    # Libraries that do not expect signals have their system calls restarted.
    signal.siginterrupt(signal.SIGVTALRM, False)
    config.pluginmanager.register(_sampled)

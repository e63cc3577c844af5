"""Runs groups of tests in parallel processes: `pytest --processes N`.

The processes are forked after the tests are collected. To import and collect every test takes 10 s of CPU
time, which is spent once here, and once for each process with pytest-xdist. A process runs one group after
the other, and gets its next group when it has finished one. Like a worker of xdist, it has
`config.workerinput`, which pytest's own plugins know.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from types import SimpleNamespace
from typing import Any, Never

import pytest
from _pytest.config import create_terminal_writer

OUTPUTS = pytest.StashKey[list[dict[str, Any]]]()
"""What the processes left in `config.workeroutput`, for the plugins of the process that forked them."""
JOIN_LIMIT_S = 60.0
"""Time limit for the exit of a process that has reported its end."""


class GroupHooks:
    """Hooks that this plugin adds to pytest's."""

    @pytest.hookspec
    def pytest_group_process_started(self) -> None:
        """Called in each process that runs groups, before its first test."""


class GroupProcessError(Exception):
    """A process failed outside of its tests."""


class Boundary(pytest.Item):
    """The item after a group's last: its place directly below the session ends every narrower fixture."""

    def runtest(self) -> Never:
        raise AssertionError("this item is never run")


@dataclass
class GroupProcess:
    """A process that runs groups, as seen by the process that forked it."""

    name: str
    process: ForkProcess
    connection: Connection
    left: deque[pytest.Item] = field(default_factory=deque)
    """Tests of its group that have not started."""
    current: pytest.Item | None = None


class GroupRunner:
    """The plugin. Distributes the groups, and reports what the tests' processes send."""

    def __init__(self, processes: int, group_of: Callable[[str], str]) -> None:
        """`group_of` returns the group of a test's node id. Tests of one group are collected in a row."""
        self._count = processes
        self._group_of = group_of
        self._groups: deque[list[pytest.Item]] = deque()
        self._places: dict[pytest.Item, int] = {}
        """Test → its index in the session's list."""
        self._running: list[GroupProcess] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None
        session.config.stash[OUTPUTS] = []
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            # Tests of different files report in turn.
            reporter.showfspath = False
        self._places = {item: place for place, item in enumerate(session.items)}
        by_group = groupby(session.items, lambda item: self._group_of(item.nodeid))
        self._groups = deque(list(items) for _, items in by_group)
        # Made before the forks, so that each process makes a directory of its own in it.
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        for number in range(min(self._count, len(self._groups))):
            self._fork(session, f"gw{number}")
        try:
            while self._running:
                for process in self._ready():
                    self._receive(session, process)
                if session.shouldfail or session.shouldstop:
                    self._stop()
        finally:
            for process in self._running:
                process.process.terminate()
            for process in self._running:
                process.process.join(JOIN_LIMIT_S)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _fork(self, session: pytest.Session, name: str) -> None:
        here, there = multiprocessing.Pipe()
        inherited = [here, *(process.connection for process in self._running)]
        arguments = (session, name, there, inherited)
        process = multiprocessing.get_context("fork").Process(target=_run_groups, name=name, args=arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        process.start()
        there.close()
        self._running.append(GroupProcess(name, process, here))

    def _ready(self) -> list[GroupProcess]:
        """Wait until a process has sent something or has ended."""
        connections = [process.connection for process in self._running]
        found = wait([*connections, *(process.process.sentinel for process in self._running)])
        return [each for each in self._running if each.connection in found or each.process.sentinel in found]

    def _receive(self, session: pytest.Session, process: GroupProcess) -> None:
        try:
            if not process.connection.poll():
                raise EOFError
            kind, content = process.connection.recv()
        except (EOFError, ConnectionResetError):
            self._died(session, process)
            return
        hook = session.config.hook
        if kind == "ready":
            if session.shouldfail or session.shouldstop:
                # The order to stop is its answer. It may have ended since.
                return
            process.left = deque(self._groups.popleft() if self._groups else [])
            process.connection.send([self._places[item] for item in process.left])
        elif kind == "started":
            process.current = process.left.popleft()
            hook.pytest_runtest_logstart(nodeid=process.current.nodeid, location=process.current.location)
        elif kind == "finished":
            assert process.current is not None
            hook.pytest_runtest_logfinish(nodeid=process.current.nodeid, location=process.current.location)
            process.current = None
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=content)
            self._log(session, process, report)
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=content)
        elif kind == "error":
            raise GroupProcessError(f"{process.name}: {content}")
        elif kind == "ended":
            session.config.stash[OUTPUTS].append(content)
            process.process.join(JOIN_LIMIT_S)
            self._running.remove(process)

    def _log(self, session: pytest.Session, process: GroupProcess, report: pytest.TestReport) -> None:
        # As in a report of xdist: the terminal names the process with -v and above a failure.
        gateway = SimpleNamespace(id=process.name)
        node = SimpleNamespace(gateway=gateway, _workerinfocache=f"[{process.name}]")
        report.node = node  # type: ignore[attr-defined]
        session.config.hook.pytest_runtest_logreport(report=report)

    def _died(self, session: pytest.Session, process: GroupProcess) -> None:
        """Fail the test during which a process died. Another process runs the rest of the group."""
        process.process.join(JOIN_LIMIT_S)
        self._running.remove(process)
        status = process.process.exitcode
        if process.current is None:
            raise GroupProcessError(f"{process.name} ended between tests with exit status {status}")
        item = process.current
        text = f"{process.name} ended during this test with exit status {status}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        self._log(session, process, report)
        if process.left:
            self._groups.appendleft([*process.left])
        if self._groups:
            self._fork(session, process.name)

    def _stop(self) -> None:
        """Let each process end after its current test."""
        self._groups.clear()
        for process in self._running:
            try:
                process.connection.send(None)
            except (BrokenPipeError, ConnectionResetError):
                continue


class Reporting:
    """The plugin of a process that runs groups: sends what its tests report. It registers itself."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection
        self._registered = False
        # pytest repeats to a new plugin the warnings of the time before.
        config.pluginmanager.register(self)
        self._registered = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        if not self._registered:
            return
        # The text and the category, because a warning may hold what cannot be sent.
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        plain = warnings.WarningMessage(text, Warning, warning_message.filename, warning_message.lineno)
        content = {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}
        self._connection.send(("warning", content))


def _run_groups(
    session: pytest.Session, name: str, connection: Connection, inherited: list[Connection]
) -> None:
    """Run group after group: what a forked process does."""
    for each in inherited:
        each.close()
    try:
        _become_group_process(session.config, name, connection)
        boundary = Boundary.from_parent(session, name="boundary")
        for item, following in _given(session, connection, boundary):
            connection.send(("started", None))
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            connection.send(("finished", None))
            # Only the order to stop comes without a request.
            if session.shouldfail or session.shouldstop or connection.poll():
                break
        session.config.hook.pytest_sessionfinish(session=session, exitstatus=pytest.ExitCode.OK)
        connection.send(("ended", session.config.workeroutput))  # type: ignore[attr-defined]
    except BaseException:
        connection.send(("error", traceback.format_exc()))
        raise


def _given(
    session: pytest.Session, connection: Connection, boundary: pytest.Item
) -> Iterator[tuple[pytest.Item, pytest.Item]]:
    """Yield each test that this process is given, and the item after it."""
    while True:
        connection.send(("ready", None))
        places: list[int] | None = connection.recv()
        if not places:
            return
        items: list[pytest.Item] = [session.items[place] for place in places]
        yield from pairwise([*items, boundary])


def _become_group_process(config: pytest.Config, name: str, connection: Connection) -> None:
    """Give the process outputs, captured output and a directory of its own, and let it report."""
    os.environ["PYTEST_XDIST_WORKER"] = name
    config.workerinput = {"workerid": name}  # type: ignore[attr-defined]
    config.workeroutput = {}  # type: ignore[attr-defined]
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    # pytest-timeout writes stacks to the terminal.
    plugins.register(SimpleNamespace(_tw=create_terminal_writer(config)), "terminalreporter")
    Reporting(config, connection)
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / name
    # A process that took over from one that died uses its directory.
    factory._basetemp.mkdir(mode=0o700, exist_ok=True)
    capture = plugins.get_plugin("capturemanager")
    if capture is not None:
        # The files that hold captured output are shared with the other processes until now.
        capture.stop_global_capturing()
        capture.start_global_capturing()
    config.hook.pytest_group_process_started()

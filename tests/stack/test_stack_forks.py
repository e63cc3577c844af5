"""Processes of a stack that are forks: their parent, what /proc shows of them, and their exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers import forked_process
from tests.helpers.forked_launches import request
from tests.helpers.forked_process import ROOT, Server
from tests.helpers.waiting import eventually_blocking

STARTS = """
import json, os, signal, subprocess, sys
from pathlib import Path

child, out = sys.argv[1:]
read, write = os.pipe()
environment = {"WHO": "the child", "OUT": out, "PARENT": str(os.getpid()), "READS": str(read)}
started = subprocess.Popen(
    [sys.executable, child, "word"],
    stdin=subprocess.DEVNULL, env=environment, start_new_session=True, pass_fds=[read],
)
os.write(write, b"sent")
first = started.wait(60)
endless = subprocess.Popen([sys.executable, child, "endless"], env=environment, pass_fds=[read])
endless.terminate()
other = subprocess.run([sys.executable, "-c", "print(5)"], capture_output=True, text=True)
Path(out + ".statuses").write_text(json.dumps([first, endless.wait(60), other.stdout]))
"""
CHILD = """
import json, os, sys, time
from pathlib import Path

if sys.argv[1] == "endless":
    time.sleep(60)
pid = os.getpid()
found = {
    "imports": "turboserve.worker.service.app" in sys.modules,
    "parent": os.getppid() == int(os.environ["PARENT"]),
    "leads": os.getsid(0) == pid,
    "read": os.read(int(os.environ["READS"]), 4).decode(),
    "environment": [p for p in Path(f"/proc/{pid}/environ").read_text().split(chr(0)) if p.startswith("WHO")],
    "line": [part for part in Path(f"/proc/{pid}/cmdline").read_text().split(chr(0)) if part],
}
Path(os.environ["OUT"]).write_text(json.dumps(found))
sys.exit(7)
"""


@pytest.mark.skipif("COVERAGE_PROCESS_CONFIG" in os.environ, reason="then no process is a fork")
def test_what_a_fork_starts_is_its_child_as_if_it_had_been_a_new_interpreter(tmp_path: Path) -> None:
    starts, child, out = tmp_path / "starts.py", tmp_path / "child.py", tmp_path / "out"
    starts.write_text(STARTS)
    child.write_text(CHILD)
    with (tmp_path / "log").open("wb") as log:
        process = forked_process.start_stack(
            [sys.executable, str(starts), str(child), str(out)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ,
        )
    assert process.wait(120) == 0, (tmp_path / "log").read_text()
    assert json.loads(out.read_text()) == {
        "imports": True,
        "parent": True,
        "leads": True,
        "read": "sent",
        "environment": ["WHO=the child"],
        "line": [sys.executable, str(child), "word"],
    }
    assert json.loads((tmp_path / "out.statuses").read_text()) == [7, -15, "5\n"]


ENDS = """
import atexit, os, signal, sys, threading, time

def later():
    time.sleep(0.2)
    print("the thread has ended")

atexit.register(print, "the first function", end="")
atexit.register(print, "the second function")
threading.Thread(target=later).start()
print("not flushed", end=" ")
{last}
"""


@pytest.mark.parametrize(
    "last",
    [
        "",
        "sys.exit()",
        "sys.exit(7)",
        "sys.exit(259)",
        "sys.exit('refused')",
        "raise ValueError('wrong')",
        "sys.excepthook = lambda *_: print('its own hook', file=sys.stderr); raise ValueError('wrong')",
        "raise KeyboardInterrupt",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "os.close(1); sys.stdout.write('nowhere')",
    ],
)
def test_a_fork_ends_as_an_interpreter_does(tmp_path: Path, last: str) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS.format(last=last))
    forked = forked_process.run([str(script)])
    fresh = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (forked.returncode, forked.stdout) == (fresh.returncode, fresh.stdout)
    # A traceback has other lines before its last one.
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """A server with the imports of a stack, for further servers."""
    shared = forked_process.new_server()
    with shared.connection:
        yield shared


TELLS = """
import json, os, sys
import beside
found = {
    "parent": os.getppid(),
    "imports": "turboserve.worker.service.app" in sys.modules,
    "beside": beside.WORD,
    "path": sys.path[:3],
    "umask": os.umask(0),
}
print(json.dumps(found))
"""


def test_a_server_that_shares_its_imports_goes_on_alone(shared: Server, tmp_path: Path) -> None:
    script, folder = tmp_path / "tells.py", tmp_path / "folder"
    script.write_text(TELLS)
    folder.mkdir()
    (folder / "beside.py").write_text("WORD = 'from PYTHONPATH'\n")
    own = forked_process.forked_server(shared)
    with own.connection, (tmp_path / "out").open("wb") as out:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{folder}"}
        output = {1: out.fileno(), 2: out.fileno()}
        before = os.umask(0o071)
        try:
            pipe = request(own.connection, [str(script)], environment, output)
        finally:
            os.umask(before)
        assert forked_process.ForkedProcess(pipe).wait(120) == 0, (tmp_path / "out").read_text()
    assert json.loads((tmp_path / "out").read_text()) == {
        "parent": own.pid,
        "imports": True,
        "beside": "from PYTHONPATH",
        "path": [str(tmp_path), str(ROOT), str(folder)],
        "umask": 0o071,
    }


WAITS = """
import sys, time
from pathlib import Path

state = Path(sys.argv[1])
try:
    state.write_text("runs")
    time.sleep(600)
except KeyboardInterrupt:
    state.write_text("interrupted")
"""


def test_a_stack_ends_with_the_process_of_the_tests(shared: Server, tmp_path: Path) -> None:
    """Incident: a killed pytest left whole stacks running."""
    script, state = tmp_path / "waits.py", tmp_path / "state"
    script.write_text(WAITS)
    state.touch()
    own = forked_process.forked_server(shared)
    with own.connection:
        pipe = request(own.connection, [str(script), str(state)], os.environ, {1: 1, 2: 2}, starts=True)
        process = forked_process.ForkedProcess(pipe)
        try:
            eventually_blocking(lambda: state.read_text() == "runs")
            # As the kernel does when the process is killed.
            own.connection.close()
            eventually_blocking(lambda: state.read_text() == "interrupted")
        finally:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

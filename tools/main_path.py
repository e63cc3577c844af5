"""Lists the files that a session goes through: creation, first chunk, delivery.

Starts a stack (`turboserve up`) whose services record every call of the project's functions. Then it creates
sessions one after the other over REST, and reads each one's first chunk over the WebSocket:

    python tools/main_path.py                      # this tree
    python tools/main_path.py --tree ../other      # another checkout that has its own .venv
    python tools/main_path.py --write main_path.txt

**What counts.** A file counts if one of its functions runs for the session:

- The window of a session begins with `POST /v1/sessions` and ends when its first chunk is received.
- The baseline is a time without sessions. A function runs for the session if its calls in the sessions'
  windows exceed those in equally long windows of the baseline: on average by half a call for each session or
  more, and by more than four standard errors. So periodic work (heartbeats, leadership, metrics) does not
  count, and neither does a heartbeat that is late.
- A session before the baseline fills caches. Imports and start-up are over by then.
- `model/` and `contracts/` do not count, and neither does the autoscaler: it only learns of sessions.

A hop ends where the next file that was not called before belongs to another service.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from math import sqrt
from pathlib import Path
from statistics import mean, median, pvariance

import httpx
from websockets.asyncio.client import connect

HERE = Path(__file__).resolve().parents[1]
EXCLUDED = ("/model/", "/contracts/")
NOT_ON_PATH = {"autoscaler"}
"""Services that no session waits for. The autoscaler only learns of sessions."""
LEAST_EXCESS = 0.5
STANDARD_ERRORS = 4.0
RECORDER = """
import os, sys, threading, time

service = next((word.split(".")[1] for word in sys.orig_argv if word.startswith("turboserve.")), None)
if service is not None:
    tree, folder = {tree!r}, {folder!r}
    known, codes, calls = {{}}, [], []

    def record(frame, event, argument):
        if event != "call":
            return
        code = frame.f_code
        called = known.get(id(code))
        if called is None:
            # Kept, so that no other code gets the same id.
            codes.append(code)
            file = code.co_filename
            ours = file.startswith(tree) and "/turboserve/" in file and code.co_name != "<module>"
            called = known[id(code)] = f"{{file[len(tree):]}}\\t{{code.co_qualname}}" if ours else ""
        if called:
            calls.append((time.monotonic(), called))

    def write():
        with open(os.path.join(folder, f"{{service}}.{{os.getpid()}}"), "a", buffering=1 << 16) as file:
            while True:
                for _ in range(len(calls)):
                    at, called = calls.pop(0)
                    file.write(f"{{at:.6f}}\\t{{called}}\\n")
                file.flush()
                time.sleep(0.2)

    threading.Thread(target=write, daemon=True).start()
    threading.setprofile(record)
    sys.setprofile(record)
"""
"""A module `sitecustomize`, which Python imports at the start of each process."""


@dataclass(frozen=True)
class Function:
    """A function of the project, as called in the process of `service`."""

    service: str
    file: str
    name: str


Calls = dict[Function, list[float]]
"""Monotonic times of the calls, ascending."""


@dataclass(frozen=True)
class Window:
    """A time from `begin` to `end`, monotonic seconds."""

    begin: float
    end: float

    def count(self, times: list[float]) -> int:
        return bisect_left(times, self.end) - bisect_left(times, self.begin)

    def parts(self, length: float) -> Iterator[Window]:
        """All windows of `length` seconds in this one, 50 ms apart."""
        steps = max(1, int((self.end - self.begin - length) / 0.05))
        for step in range(steps):
            begin = self.begin + step * 0.05
            yield Window(begin, begin + length)


@dataclass(frozen=True)
class Hop:
    """A service, and the files that are called there for the first time before another service is reached."""

    service: str
    files: list[str]


@contextmanager
def recorded_stack(tree: Path, port: int, workers: str | None) -> Iterator[Path]:
    """Run a stack of `tree`'s code with recording services; yields the folder of the records."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        modules, records = Path(scratch, "modules"), Path(scratch, "records")
        modules.mkdir()
        records.mkdir()
        recorder = RECORDER.format(tree=f"{tree}/", folder=str(records))
        (modules / "sitecustomize.py").write_text(recorder)
        command = [f"{tree}/.venv/bin/turboserve", "up", "--port", str(port), "--data", f"{scratch}/data"]
        if workers is not None:
            command += ["--workers", workers]
        # A work tree may share another checkout's environment: then PYTHONPATH names its packages.
        packages = os.environ.get("PYTHONPATH", "") if tree == HERE else ""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(modules), packages]))}
        with Path(scratch, "log").open("w") as log:
            stack = subprocess.Popen(command, cwd=scratch, env=environment, stdout=log, stderr=log)
            try:
                yield records
            finally:
                stack.send_signal(signal.SIGINT)
                stack.wait(120)


async def one_session(api: httpx.AsyncClient, url: str) -> Window:
    """Create a session, read its first chunk, end it. Returns the time until the chunk was there."""
    begin = time.monotonic()
    created = await api.post("/v1/sessions", json={"prompt": "a red circle moving left", "seed": 7})
    created.raise_for_status()
    session = created.json()["id"]
    async with connect(
        f"{url.replace('http', 'ws', 1)}/v1/sessions/{session}/stream", max_size=None
    ) as socket:
        announced = ""
        while announced != "chunk":
            message = await socket.recv()
            announced = json.loads(message)["type"] if isinstance(message, str) else announced
        await socket.recv()
        end = time.monotonic()
    (await api.delete(f"/v1/sessions/{session}")).raise_for_status()
    return Window(begin, end)


async def scene(url: str, sessions: int, quiet_s: float) -> tuple[Window, list[Window]]:
    """Returns the baseline and the windows of the sessions."""
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as api:
        deadline = time.monotonic() + 300.0
        while True:
            try:
                await one_session(api, url)
                break
            except (httpx.HTTPError, OSError):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.5)
        await asyncio.sleep(5.0)
        begin = time.monotonic()
        await asyncio.sleep(quiet_s)
        baseline = Window(begin, time.monotonic())
        windows = []
        for _ in range(sessions):
            windows.append(await one_session(api, url))
            await asyncio.sleep(3.0)
    return baseline, windows


def read(records: Path) -> Calls:
    """All recorded calls, without those in folders that do not count."""
    calls: Calls = defaultdict(list)
    for path in records.iterdir():
        service = path.name.partition(".")[0]
        for line in path.read_text().splitlines():
            if line.count("\t") == 2 and service not in NOT_ON_PATH:
                at, file, name = line.split("\t")
                if not any(folder in file for folder in EXCLUDED):
                    calls[Function(service, file, name)].append(float(at))
    for times in calls.values():
        times.sort()
    return calls


def path(calls: Calls, baseline: Window, windows: list[Window]) -> dict[Function, float]:
    """The functions that run for a session; the median time of their first call after its begin, seconds."""
    found: dict[Function, float] = {}
    for function, times in calls.items():
        counts = [window.count(times) for window in windows]
        if not any(counts):
            continue
        usual = [
            [part.count(times) for part in baseline.parts(window.end - window.begin)] for window in windows
        ]
        excess = mean(counts) - mean(mean(parts) for parts in usual)
        error = sqrt(sum(pvariance(parts) for parts in usual)) / len(windows)
        if excess >= LEAST_EXCESS and excess > STANDARD_ERRORS * error:
            first = [
                times[bisect_left(times, window.begin)] - window.begin
                for window in windows
                if window.count(times)
            ]
            found[function] = median(first)
    return dict(sorted(found.items(), key=lambda entry: entry[1]))


def hops(functions: dict[Function, float]) -> list[Hop]:
    """Each service's files in order of their first call, grouped by service."""
    first: dict[tuple[str, str], float] = {}
    for function, at in functions.items():
        first.setdefault((function.service, function.file), at)
    return [
        Hop(service, [file for _, file in group])
        for service, group in groupby(first, key=lambda entry: entry[0])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, default=HERE, help="the checkout whose stack runs")
    parser.add_argument("--port", type=int, default=8970, help="the gateway's port")
    parser.add_argument("--workers", help="as of `turboserve up`")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--quiet-s", type=float, default=30.0, help="length of the baseline, seconds")
    parser.add_argument("--functions", action="store_true", help="print each function, too")
    parser.add_argument("--write", type=Path, help="write the hops to this file")
    options = parser.parse_args()
    tree = options.tree.resolve()
    with recorded_stack(tree, options.port, options.workers) as records:
        baseline, windows = asyncio.run(
            scene(f"http://127.0.0.1:{options.port}", options.sessions, options.quiet_s)
        )
        time.sleep(1.0)
        calls = read(records)
    functions = path(calls, baseline, windows)
    seconds = ", ".join(f"{window.end - window.begin:.2f}" for window in windows)
    print(f"sessions: {len(windows)}, seconds to the first chunk: {seconds}", file=sys.stderr)
    lines = []
    for hop in hops(functions):
        lines.append(hop.service)
        lines += [f"  {file}" for file in hop.files]
    names = defaultdict(list)
    for function, at in functions.items():
        names[function.file].append(f"{at * 1e3:8.1f} ms  {function.service:12} {function.name}")
    if options.functions:
        for file, entries in sorted(names.items()):
            print(file, *entries, sep="\n    ")
    print(*lines, sep="\n")
    if options.write:
        options.write.write_text("\n".join(lines) + "\n")
    folders = Counter(file.split("/turboserve/")[0] for file in names)
    print(*(f"{count:4} {folder}" for folder, count in sorted(folders.items())), sep="\n")
    print(f"{len(names):4} files")


if __name__ == "__main__":
    main()

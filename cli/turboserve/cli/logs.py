"""`turboserve logs`: the logs of a stack's processes, also of one that has stopped."""

from __future__ import annotations

import heapq
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from turboserve.cli.errors import failure
from turboserve.cli.up import DATA

POLL_S = 0.25


_SERVER_TIMES = (
    # NATS, Redis, Postgres. The second group is the time zone, where the line has one.
    (re.compile(r"\[\d+\] (\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d+)()"), "%Y/%m/%d %H:%M:%S.%f"),
    (re.compile(r"\d+:\w (\d\d \w{3} \d{4} \d\d:\d\d:\d\d\.\d+)()"), "%d %b %Y %H:%M:%S.%f"),
    (re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+) (\w+)"), "%Y-%m-%d %H:%M:%S.%f"),
)


class Line(NamedTuple):
    """One line of one process."""

    at: float
    """Time of the line, Unix seconds: its own, or that of the last line before it that has one."""
    name: str
    """Name of the process."""
    text: str


def logs(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Processes. The default is all.")
    ] = None,
    data: Annotated[Path, DATA] = Path(".turboserve"),
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of newest lines.")] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print also new lines, until Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")] = False,
) -> None:
    """Print what the processes of a stack have logged, in the order of time."""
    from turboserve.cli.embedded import Layout
    from turboserve.cli.supervisor.logs import LineFormat, wants_colour

    folder = Layout(data).logs
    files = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if not files:
        raise failure(f"--data: {folder} has no logs: no stack has run on {data}")
    unknown = sorted(set(names or ()) - set(files))
    if unknown:
        raise failure(f"NAME: {unknown[0]!r} has no log; known: {', '.join(files)}")
    chosen = {name: path for name, path in files.items() if not names or name in names}
    shown = LineFormat(coloured=not as_json and wants_colour(sys.stdout, os.environ))
    # A line that is written from here on is a new one. It is printed once, by the tail.
    sizes = {name: path.stat().st_size for name, path in chosen.items()}
    tails = [Tail(name, path, sizes[name]) for name, path in chosen.items()]
    for line in chain(newest(chosen, lines, sizes), following(tails) if follow else ()):
        typer.echo(shown.json(line.name, line.text) if as_json else shown.text(line.name, line.text))


def newest(files: Mapping[str, Path], count: int, sizes: Mapping[str, int]) -> list[Line]:
    """Return the newest lines of several files, in the order of time.

    `sizes` has the number of bytes to read of each file, by the name of its process.
    """
    tails = [deque(_read(name, path, sizes[name]), maxlen=count) for name, path in files.items()]
    merged = list(heapq.merge(*tails, key=lambda line: line.at))
    return merged[len(merged) - count :] if count < len(merged) else merged


def following(tails: Sequence[Tail]) -> Iterator[Line]:
    """Yield what is written from now on; never ends."""
    while True:
        for tail in tails:
            for text in tail.read():
                yield Line(0.0, tail.name, text)
        time.sleep(POLL_S)


class Tail:
    """Reads a file from byte `begin` on, and what is written later, also after the file was rotated."""

    def __init__(self, name: str, path: Path, begin: int) -> None:
        self.name = name
        self._path = path
        self._place = begin
        self._rest = b""

    def read(self) -> list[str]:
        """Return the lines that were completed since the last call."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._place:
                    # The file was rotated: this is the next one.
                    self._place, self._rest = 0, b""
                file.seek(self._place)
                data = file.read()
        except FileNotFoundError:
            return []
        self._place += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in whole]


def _read(name: str, path: Path, size: int) -> Iterator[Line]:
    at = 0.0
    with path.open("rb") as file:
        while line := file.readline(size):
            size -= len(line)
            text = line.decode(errors="replace").rstrip("\r\n")
            at = max(at, time_of(text) or 0.0)
            yield Line(at, name, text)


def time_of(text: str) -> float | None:
    """Return the time of a line, Unix seconds. None: it has none."""
    from turboserve.cli.supervisor.logs import parse

    record = parse(text)
    try:
        if record is not None:
            return datetime.fromisoformat(str(record.get("timestamp"))).timestamp()
        for pattern, form in _SERVER_TIMES:
            if found := pattern.match(text):
                at = datetime.strptime(found[1], form)
                return at.replace(tzinfo=UTC if found[2] in ("UTC", "GMT") else None).timestamp()
    except ValueError:
        pass
    return None

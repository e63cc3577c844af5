"""Reads traces of the product's form and files of requests, whose sessions are derived as for Azure."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path

from turboserve.contracts.errors import InvalidInputError
from turboserve.experiments.autoscale.production import STAY_S, sessions_of
from turboserve.experiments.autoscale.trace import COLUMNS, LONGEST_S, WorkloadTrace, read

TIMES = ("time_s", "TIMESTAMP")
TOKENS = ("generated_tokens", "GeneratedTokens")
CONCURRENT = 50
"""Sessions at once to which requests are thinned, as in the shipped Azure trace."""


def read_any(path: Path) -> WorkloadTrace:
    """Read a trace, or requests from which sessions are derived (`production.sessions_of`).

    Requests are thinned to about `CONCURRENT` sessions at once. Raises InvalidInputError that names the row.
    """
    try:
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            names = rows.fieldnames or ()
            listed = [] if set(COLUMNS) <= set(names) else list(rows)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInputError(f"{path.name} cannot be read: {error}", field=path.name) from None
    if set(COLUMNS) <= set(names):
        return read(path)
    time = next((name for name in TIMES if name in names), None)
    tokens = next((name for name in TOKENS if name in names), None)
    if time is None or tokens is None or not listed:
        detail = f"{path.name} has no rows with {','.join(COLUMNS)}, or with a time and generated tokens"
        raise InvalidInputError(detail, field=path.name, limit=",".join((*TIMES, *TOKENS)))
    found = [_request(row, time, tokens, f"{path.name}[{number}]") for number, row in enumerate(listed)]
    first = min(at for at, _ in found)
    requests = sorted((at - first, count) for at, count in found)
    lasts_s = requests[-1][0] - 2 * STAY_S
    if not 0 < lasts_s <= LONGEST_S:
        detail = f"{path.name} lasts {requests[-1][0]:g} s; the first {2 * STAY_S:g} s fill the system"
        raise InvalidInputError(detail, field=path.name, limit=LONGEST_S)
    every = max(round(len(requests) / requests[-1][0] * STAY_S / CONCURRENT), 1)
    return sessions_of(requests, path.stem, every, lasts_s, 1, path.stem)


def read_all(paths: Iterable[Path], taken: Iterable[str]) -> list[WorkloadTrace]:
    """Read several traces, as `read_any`. Each is named after its file, without folder and suffix.

    `taken`: names that no file may have. Raises InvalidInputError also for a name that is taken.
    """
    known = dict.fromkeys(taken, "one of the benchmark's own traces")
    found = []
    for path in paths:
        if path.stem in known:
            detail = f"{path} would have the same name as {known[path.stem]} in the results; rename the file"
            raise InvalidInputError(detail, field=path.stem)
        found.append(read_any(path))
        known[path.stem] = str(path)
    return found


def _request(row: Mapping[str, str | None], time: str, tokens: str, field: str) -> tuple[float, int]:
    text = row[time] or ""
    try:
        # Azure's times have seven digits after the second.
        at = float(text) if time == "time_s" else datetime.fromisoformat(text[:26]).timestamp()
    except ValueError:
        raise InvalidInputError(f"{text!r} is not a time", field=f"{field}.{time}") from None
    if not math.isfinite(at):
        raise InvalidInputError(f"{text!r} is not a time", field=f"{field}.{time}")
    count = row[tokens] or ""
    if not (count.isascii() and count.isdigit() and len(count) <= 9):
        raise InvalidInputError(f"{count!r} is not a number of tokens", field=f"{field}.{tokens}")
    return at, max(int(count), 1)

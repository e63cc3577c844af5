"""Traces of sessions' changes. Files are CSV with the columns time_s, session, event.

`table_schema` describes such files by the Table Schema of Frictionless Data; `docs/reference/trace-files.md`
adds the rules that a schema of columns cannot express.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turboserve.autoscaler.control.events import SessionChange
from turboserve.contracts.base import is_id
from turboserve.contracts.errors import InvalidInputError

COLUMNS = ("time_s", "session", "event")
END = "end"
"""Event of the last row, without a session: the trace ends at its time. A file may lack this row."""
LONGEST_S = 7 * 86_400.0
"""Longest trace.

A replay takes one step per second, so clock times instead of trace times would never end.
"""
MAY_FOLLOW: Mapping[SessionChange | None, frozenset[SessionChange]] = {
    None: frozenset({SessionChange.ARRIVAL}),
    SessionChange.ARRIVAL: frozenset({SessionChange.IDLING, SessionChange.DEPARTURE}),
    SessionChange.ACTIVATION: frozenset({SessionChange.IDLING, SessionChange.DEPARTURE}),
    SessionChange.IDLING: frozenset({SessionChange.ACTIVATION, SessionChange.DEPARTURE}),
    SessionChange.DEPARTURE: frozenset(),
}
"""Changes that a session may make after each change."""


@dataclass(frozen=True)
class Step:
    """One change of one session, at `at` seconds from the start of the trace."""

    at: float
    session: str
    kind: SessionChange


@dataclass(frozen=True)
class WorkloadTrace:
    """Steps in order of time, until `ends_s`."""

    name: str
    steps: tuple[Step, ...]
    ends_s: float

    @property
    def digest(self) -> str:
        """First 12 hex digits of the SHA-256 of its steps."""
        text = "".join(f"{s.at:.6f},{s.session},{s.kind}\n" for s in self.steps)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def active(self, step_s: float = 1.0) -> list[int]:
        """Return the active sessions at 0, `step_s`, 2 `step_s`, …, including the changes at that instant."""
        counts: list[int] = []
        count = 0
        for step, by in changes(self.steps):
            while len(counts) * step_s < step.at:
                counts.append(count)
            count += by
        return [*counts, *[count] * (math.ceil(self.ends_s / step_s) - len(counts))]

    def count(self, kind: SessionChange, since: float = 0.0, until: float = math.inf) -> int:
        """Count the changes of this kind at `since` ≤ t < `until`."""
        return sum(s.kind is kind and since <= s.at < until for s in self.steps)

    @property
    def sessions(self) -> list[str]:
        """Ids of all sessions, in order of arrival."""
        return list(dict.fromkeys(step.session for step in self.steps))

    @property
    def peak(self) -> int:
        """Largest number of active sessions at any instant."""
        peak = count = 0
        for _, by in changes(self.steps):
            count += by
            peak = max(peak, count)
        return peak


def changes(steps: Iterable[Step]) -> Iterator[tuple[Step, int]]:
    """Yield every step, with its change of the number of active sessions."""
    active: set[str] = set()
    for step in steps:
        if step.kind in (SessionChange.ARRIVAL, SessionChange.ACTIVATION):
            active.add(step.session)
            yield step, 1
        else:
            yield step, -1 if step.session in active else 0
            active.discard(step.session)


def since(steps: Iterable[Step], begins_s: float, ends_s: float) -> list[Step]:
    """Return the steps after `begins_s`, which becomes 0, and before `ends_s`.

    A session active at `begins_s` arrives at 0; a session idle then arrives when it returns.
    """
    active: dict[str, None] = {}
    idle: set[str] = set()
    after: list[Step] = []
    for step in steps:
        if step.at >= ends_s:
            break
        if step.at <= begins_s:
            active.pop(step.session, None)
            idle.discard(step.session)
            if step.kind is SessionChange.IDLING:
                idle.add(step.session)
            elif step.kind is not SessionChange.DEPARTURE:
                active[step.session] = None
        elif step.session not in idle:
            after.append(Step(step.at - begins_s, step.session, step.kind))
        else:
            idle.discard(step.session)
            if step.kind is SessionChange.ACTIVATION:
                after.append(Step(step.at - begins_s, step.session, SessionChange.ARRIVAL))
    return [Step(0.0, session, SessionChange.ARRIVAL) for session in active] + after


def checked(name: str, steps: Iterable[Step], ends_s: float, where: str = "trace") -> WorkloadTrace:
    """Build a trace of `steps`.

    Raises InvalidInputError that names the row and field if a time falls, is negative, is not finite or is
    more than a week from the beginning, or if a session makes a change that cannot follow.
    """
    state: dict[str, SessionChange] = {}
    given: list[Step] = []
    last = 0.0
    for number, step in enumerate(steps):
        field = f"{where}[{number}]"
        if not 0 <= step.at <= LONGEST_S:
            detail = f"time {step.at} is not within 0 to {LONGEST_S:g} s from the start of the trace"
            raise InvalidInputError(detail, field=f"{field}.time_s", limit=LONGEST_S)
        if step.at < last:
            detail = f"time {step.at:g} comes after {last:g}: times must not decrease"
            raise InvalidInputError(detail, field=f"{field}.time_s", limit=last)
        before = state.get(step.session)
        if step.kind not in MAY_FOLLOW[before]:
            detail = f"session {step.session}: {step.kind} cannot follow {before or 'nothing'}"
            raise InvalidInputError(detail, field=f"{field}.event")
        state[step.session] = step.kind
        given.append(step)
        last = step.at
    if not last <= ends_s <= LONGEST_S or ends_s == 0:
        raise InvalidInputError(f"it ends at {ends_s}", field=f"{where}.ends_s", limit=last)
    return WorkloadTrace(name, tuple(given), ends_s)


def read(path: Path) -> WorkloadTrace:
    """Read a trace from a CSV file; it ends with its row `end`, or without one with its last step.

    Raises InvalidInputError that names the row.
    """
    try:
        rows = list(csv.DictReader(path.read_text().splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInputError(f"{path.name} cannot be read: {error}", field=path.name) from None
    if not rows or set(COLUMNS) - rows[0].keys():
        detail = f"{path.name} has no rows with the columns {', '.join(COLUMNS)}"
        raise InvalidInputError(detail, field=path.name, limit=",".join(COLUMNS))
    ends_s = None
    if rows[-1]["event"] == END:
        field = f"{path.name}[{len(rows) - 1}]"
        ends_s = _seconds(rows[-1], field)
        if rows.pop()["session"]:
            raise InvalidInputError(f"the row {END!r} has no session", field=f"{field}.session")
    steps = [_step(row, f"{path.name}[{number}]") for number, row in enumerate(rows)]
    if ends_s is None:
        ends_s = max(steps[-1].at, 1e-9)
    return checked(path.stem, steps, ends_s, path.name)


def _seconds(row: Mapping[str, str | None], field: str) -> float:
    try:
        return float(row["time_s"] or "")
    except ValueError:
        raise InvalidInputError(
            f"{row['time_s']!r} is not a number of seconds", field=f"{field}.time_s"
        ) from None


def _step(row: Mapping[str, str | None], field: str) -> Step:
    at = _seconds(row, field)
    session, event = row["session"] or "", row["event"] or ""
    if not is_id(session):
        raise InvalidInputError(f"invalid session {session!r}", field=f"{field}.session")
    try:
        return Step(at, session, SessionChange(event))
    except ValueError:
        limit = ", ".join(SessionChange)
        raise InvalidInputError(f"{event!r} is not an event", field=f"{field}.event", limit=limit) from None


def write(trace: WorkloadTrace, path: Path) -> None:
    """Write a CSV file for `read`."""
    lines = [f"{step.at:.6f},{step.session},{step.kind}" for step in trace.steps]
    lines.append(f"{trace.ends_s:.6f},,{END}")
    path.write_text("\n".join([",".join(COLUMNS), *lines]) + "\n")


def table_schema() -> dict[str, Any]:
    """Return the Table Schema (Frictionless Data) of trace files."""
    time_s, session, event = COLUMNS
    return {
        "$schema": "https://datapackage.org/profiles/2.0/tableschema.json",
        "title": "Trace of sessions' changes",
        "fieldsMatch": ["superset"],
        "fields": [
            {
                "name": time_s,
                "type": "number",
                "title": "Seconds since the beginning of the trace; times do not decrease",
                "constraints": {"required": True, "minimum": 0, "maximum": LONGEST_S},
            },
            {
                "name": session,
                "type": "string",
                "title": "Id of the session; empty in the row of the end",
            },
            {
                "name": event,
                "type": "string",
                "title": "What changes",
                "constraints": {"required": True, "enum": [*SessionChange, END]},
            },
        ],
    }

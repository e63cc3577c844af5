"""Writes a trace drawn to published statistics as arrivals for `turboserve bench simulate --arrivals`.

    python tools/production_arrivals.py T5 t5.csv

Each session plays once, from its arrival on, for as long as it is active in the trace. So more sessions play
at once than in the trace, where active periods alternate with idle ones.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from turboserve.autoscaler.control.events import SessionChange
from turboserve.experiments.autoscale.production import production
from turboserve.experiments.autoscale.trace import WorkloadTrace

BEGINS = (SessionChange.ARRIVAL, SessionChange.ACTIVATION)


def arrivals(trace: WorkloadTrace) -> list[tuple[float, float]]:
    """Return each session's arrival and its whole active time, seconds, in the order of arrival."""
    arrived: dict[str, float] = {}
    active: dict[str, float] = {}
    since: dict[str, float] = {}
    for step in trace.steps:
        if step.kind in BEGINS:
            arrived.setdefault(step.session, step.at)
            since[step.session] = step.at
        elif (began := since.pop(step.session, None)) is not None:
            active[step.session] = active.get(step.session, 0.0) + step.at - began
    for session, began in since.items():
        active[session] = active.get(session, 0.0) + trace.ends_s - began
    return [(at, active[session]) for session, at in sorted(arrived.items(), key=lambda each: each[1])]


def main() -> None:
    """Write the file that the arguments name: trace, file."""
    name, out = sys.argv[1:]
    with Path(out).open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("arrives_s", "plays_s"))
        rows.writerows((f"{at:.3f}", f"{plays:.3f}") for at, plays in arrivals(production(name)))


if __name__ == "__main__":
    main()

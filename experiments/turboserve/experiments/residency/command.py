"""Sessions beyond a worker's slabs: how many it serves without a stall, and what a return takes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from turboserve.bench.report import BenchError
from turboserve.experiments.progress import progress_bar
from turboserve.experiments.residency.engine import compare
from turboserve.experiments.residency.virtual import (
    CARRIES,
    SLABS,
    ResidencyOutcome,
    ResidencyRun,
    simulate,
)

COPIES_S = (0.02, 0.07, 0.2)
"""Times of a copy: 0.07 s are measured for a state of 3.64 GB (docs/performance.md)."""
COPY_S = 0.07
LEADS_S = (1.5, 3.0, 6.0)
LEAD_S = 3.0
"""The shipped lead."""
FIRST_SEED = 100
PARTS = ("virtual", "engine")
DEFINITIONS = {
    "sessions": "Concurrent streams of a minute on one worker, which arrive within 15 s.",
    "none": "Without offloading: a stream beyond the slabs waits until a slab is free.",
    "offloaded": "With TURBOSERVE_HOST_SESSIONS for the sessions beyond the slabs.",
    "smooth_sessions": "Largest number of sessions with which no viewer stalls with any seed. A first chunk "
    "that comes more than 2 s after the request is a stall.",
    "cpr": "Mean over streams of the share of chunks that are there when the viewer needs them.",
    "engine": "Real time on this machine. If viewers stall with a slab for each session (`resident`), the "
    "machine is too busy for the comparison.",
    "return_s": "Mean time from the begin of a copy to a slab until the session may compute.",
}


def run(
    quick: Annotated[bool, typer.Option("--quick", help="One seed, one copy time and one lead.")] = False,
    only: Annotated[str, typer.Option(help=f"Part to run: {' or '.join(PARTS)}. The default is both.")] = "",
    seeds: Annotated[int, typer.Option(min=0, help="Number of seeds. 0: by size.")] = 0,
    seconds: Annotated[float, typer.Option(min=5, help="Time of each run of the real engine.")] = 30.0,
) -> dict[str, Any]:
    """Compare a worker that serves more sessions than slabs with one that does not.

    In virtual time, on declared devices that compute three times as many sessions as their slabs hold; and
    with the real engine on this CPU, in real time.
    """
    if only and only not in PARTS:
        raise BenchError(f"--only: {only!r} is not known; known: {', '.join(PARTS)}")
    numbers = range(FIRST_SEED, FIRST_SEED + (seeds or (1 if quick else 3)))
    began_cpu_s = time.process_time()
    result: dict[str, Any] = {"definitions": DEFINITIONS}
    if only != "engine":
        result["virtual"] = {"slabs": SLABS, "computing_carries": CARRIES, "seeds": [*numbers]}
        result["virtual"] |= virtual([*numbers], quick)
    if only != "virtual":
        result["engine"] = compare(seconds)
    result["cpu_seconds"] = round(time.process_time() - began_cpu_s, 1)
    return result


def virtual(seeds: Sequence[int], quick: bool) -> dict[str, Any]:
    """Return the rows by copy time and lead."""
    chosen = [(COPY_S, LEAD_S)]
    if not quick:
        others = [(copy_s, LEAD_S) for copy_s in COPIES_S] + [(COPY_S, lead_s) for lead_s in LEADS_S]
        chosen += [each for each in others if each not in chosen]
    rows: dict[str, Any] = {}
    sizes = range(SLABS, CARRIES + 2)
    with progress_bar((len(sizes) + len(sizes) * len(chosen)) * len(seeds)) as done:

        def figures(sessions: int, offloads: bool, copy_s: float, lead_s: float) -> dict[str, Any]:
            outcomes = []
            for seed in seeds:
                outcomes.append(simulate(ResidencyRun(sessions, offloads, copy_s, lead_s, seed)))
                done(f"{sessions} sessions, copy {copy_s:g} s, lead {lead_s:g} s")
            return figures_of(outcomes)

        none = {str(size): figures(size, False, COPY_S, LEAD_S) for size in sizes}
        for copy_s, lead_s in chosen:
            offloaded = {str(size): figures(size, True, copy_s, lead_s) for size in sizes}
            rows[f"copy {copy_s:g} s, lead {lead_s:g} s"] = {
                "smooth_sessions": smooth(offloaded),
                "sessions": offloaded,
            }
    return {"none": {"smooth_sessions": smooth(none), "sessions": none}, "offloaded": rows}


def figures_of(outcomes: Sequence[ResidencyOutcome]) -> dict[str, Any]:
    """Return the means over the seeds."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return {
        "smooth": all(each.smooth for each in outcomes),
        "cpr": mean([each.metrics.cpr for each in outcomes]),
        "ttfc_p95_s": mean([each.metrics.ttfc_p95_s for each in outcomes]),
        "stalls_per_stream": mean([each.metrics.stalls_per_stream for each in outcomes]),
        "returns": mean([each.returns for each in outcomes]),
        "late_returns": mean([each.late_returns for each in outcomes]),
        "violations": sum(each.violations for each in outcomes),
    }


def smooth(rows: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the largest number of sessions up to which every row is smooth; 0 if the first is not."""
    most = 0
    for size, row in rows.items():
        if not row["smooth"]:
            break
        most = int(size)
    return most


def table(result: Mapping[str, Any]) -> Table:
    """Format the largest numbers of sessions, and the runs of the real engine."""
    shown = Table("", "smooth sessions", "stalls", "returns", "return, ms", box=box.SIMPLE)
    part = result.get("virtual")
    if part is not None:
        shown.add_row(f"{part['slabs']} slabs, none offloaded", str(part["none"]["smooth_sessions"]))
        for name, row in part["offloaded"].items():
            returns = row["sessions"].get(str(row["smooth_sessions"]), {}).get("returns", 0.0)
            shown.add_row(name, str(row["smooth_sessions"]), "", f"{returns:.0f}")
    if "engine" in result:
        for name in ("resident", "offloaded"):
            row = result["engine"][name]
            return_s = row["return_s"]
            shown.add_row(
                f"toyworld, {result['engine']['sessions']} sessions, {name}",
                "",
                str(row["stalls"]),
                str(row["returns"]),
                "" if return_s is None else f"{1000 * return_s:.1f}",
            )
    return shown

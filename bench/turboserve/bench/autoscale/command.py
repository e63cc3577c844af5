"""`turboserve bench autoscale`: the controller on a virtual clock, against oracles and other autoscalers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, Group
from rich.table import Table

from turboserve.bench.autoscale import cases
from turboserve.bench.autoscale.agreement import agreement
from turboserve.bench.autoscale.azure import SCALES
from turboserve.bench.autoscale.plant import Plant
from turboserve.bench.autoscale.production import TRACES, production
from turboserve.bench.report import BenchError

CASES = ("profiling", "windows", "production", "real", "oscillation", "sweep", "agreement")
WINDOW_DELAYS = (2.0, 10.0)
SWEEP_DELAYS = (2.0, 10.0, 30.0, 60.0)


def run(
    only: Annotated[str, typer.Option(help=f"Cases, separated by commas, of: {', '.join(CASES)}.")] = "",
    segments: Annotated[int, typer.Option(min=1, help="Segments of each profiled level.")] = 3,
    training: Annotated[int, typer.Option(min=1, help="Traces that the ten windows' table is from.")] = 3,
    hours: Annotated[float, typer.Option(min=0.05, help="Length of the real arrivals, hours.")] = 0.5,
) -> dict[str, Any]:
    """The autoscaler's controller with the scheduler's placement, on a virtual clock: cost and lateness
    against oracles, fixed pools and a utilisation autoscaler."""
    wanted = [name.strip() for name in only.split(",") if name.strip()] or list(CASES)
    unknown = sorted(set(wanted) - set(CASES))
    if unknown:
        raise BenchError(f"--only: no case is called {unknown[0]!r}; there are: {', '.join(CASES)}")
    say = Console(stderr=True).print
    steps: dict[str, Callable[[], Any]] = {
        "profiling": lambda: cases.profiling_case(segments, say),
        "windows": lambda: {
            f"start_up_{delay:g}_s": cases.windows_case(delay, training, say) for delay in WINDOW_DELAYS
        },
        "production": lambda: cases.production_case(tuple(TRACES), say),
        "real": lambda: cases.real_case(SCALES, hours * 3600, say),
        "oscillation": lambda: cases.oscillation_case(say),
        "sweep": lambda: cases.start_up_sweep(SWEEP_DELAYS, say),
        "agreement": lambda: {
            str(workers): agreement(production("T1"), workers, Plant(most=64)) for workers in (10, 20)
        },
    }
    result: dict[str, Any] = {"definitions": DEFINITIONS, "seconds": {}}
    for name in CASES:
        if name in wanted:
            began_s = time.monotonic()
            result[name] = steps[name]()
            result["seconds"][name] = round(time.monotonic() - began_s, 1)
    if "production" in result:
        result["oracle_gap_percent"] = result["production"]["oracle_gap_percent"]
    return result


DEFINITIONS = {
    "cost_worker_s": "seconds of workers from launch to release: starting and draining ones too",
    "latency": "L(n) = 133.6 ms × n sessions on the worker, K = 5; after a move 24 ms more for one chunk",
    "late_chunks": "activations whose first chunk, the wait for a slot included, and moved sessions' next "
    "chunks, that came after 670 ms",
    "worst_served_ms": "worst L(n) of sessions on a worker, without waits and moves: what the paper reports",
    "start_up_s": "from the decision to a worker that serves; 10 s unless said otherwise",
    "windowed oracle": "same controller, limits and cool-downs; the cheapest ρ̂ for each window of 30 s with "
    "no late chunk, future known",
    "oracle": "workers that hold each minute's peak at the utilisation named, cheapest schedule (dynamic "
    "program), each start paid for start_up_s",
    "gaps": "cost over the oracle's cost, less one; oracle_gap_percent counts their sizes, either way",
}


def table(result: Mapping[str, Any]) -> Group:
    """The main figures for people."""
    shown = [_PARTS[name](result[name]) for name in CASES if name in result and name in _PARTS]
    return Group(*shown, f"seconds: {result['seconds']}")


def _profiling(found: Mapping[str, Any]) -> Table:
    columns = ("level", "volatility", "arrivals", "peak_active", "target_utilization", "pass_rate",
               "cost_worker_s")  # fmt: skip
    shown = Table(*columns, title="profiling (Tables 5 and 6)", box=box.SIMPLE)
    for row in found["levels"]:
        shown.add_row(*(f"{row[column]:g}" for column in columns))
    return shown


def _windows(found: Mapping[str, Any]) -> Table:
    shown = Table("start-up", "who", "cost", "mean ms", "worst ms", "late", "gap %", title="ten windows",
                  box=box.SIMPLE)  # fmt: skip
    for case in found.values():
        for who in ("ours", "oracle"):
            row = case[who]
            if row is not None:
                gap = str(case["gap_percent"]) if who == "ours" else ""
                shown.add_row(f"{case['start_up_s']:g} s", who, *_row(row), gap)
    return shown


def _production(found: Mapping[str, Any]) -> Table:
    shown = Table("trace", "who", "cost", "mean ms", "worst ms", "late", "gap %", title="T1 to T3",
                  box=box.SIMPLE)  # fmt: skip
    for name, rows in found["traces"].items():
        for who, row in rows.items():
            shown.add_row(name, who, *_row(row), str(row.get("gap_percent", "")))
    return shown


def _real(found: Mapping[str, Any]) -> Table:
    shown = Table("scale", "who", "cost", "mean ms", "worst ms", "late", "of the oracle's cost",
                  title="real arrivals", box=box.SIMPLE)  # fmt: skip
    for name, rows in found.items():
        for who, row in rows.items():
            shown.add_row(name, who, *_row(row), str(row["cost_of_oracle"]))
    return shown


def _plain(title: str) -> Callable[[Mapping[str, Any]], Table]:
    def shown(found: Mapping[str, Any]) -> Table:
        whole = Table(title=title, show_header=False, box=box.SIMPLE)
        for name, value in found.items():
            whole.add_row(name, str(value))
        return whole

    return shown


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    names = ("cost_worker_s", "mean_latency_ms", "worst_chunk_ms", "late_chunks")
    return tuple(f"{row[name]:g}" for name in names)


_PARTS: dict[str, Callable[[Mapping[str, Any]], Table]] = {
    "profiling": _profiling,
    "windows": _windows,
    "production": _production,
    "real": _real,
    "oscillation": _plain("oscillation"),
    "sweep": _plain("T1 by start-up time"),
    "agreement": _plain("the whole scheduler core against the simulator"),
}

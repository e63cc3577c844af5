"""SlackServe's workloads and policies on the simulator: chunks in time, first chunks, stalls, quality."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from turboserve.bench.report import BenchError
from turboserve.experiments.progress import progress_bar
from turboserve.experiments.slack.cells import Cell, CellResult, CellStore, source_digest
from turboserve.experiments.slack.decisions import POLICIES as DECIDERS
from turboserve.experiments.slack.decisions import decision_times
from turboserve.experiments.slack.load import STEPS, highest_rate
from turboserve.experiments.slack.metrics import interval, summarize
from turboserve.experiments.slack.policies import ABLATIONS, MAIN, POLICIES, SAME_RUNS
from turboserve.experiments.slack.profiles import PROFILES
from turboserve.experiments.slack.real import run_real
from turboserve.experiments.slack.real import table as real_table
from turboserve.experiments.slack.workloads import WORKLOADS

SEEDS, QUICK_SEEDS = 5, 2
STREAMS, QUICK_STREAMS = 120, 60
"""Streams of a run with 16 workers."""
FIRST_SEED = 100
"""Seeds below this were used for tuning."""
WANTED_CPR = 0.95
TICKS = 20
"""Number of states in which each decision is timed."""
RATES = (0.6, 1.0, 1.4, 1.8, 2.2)
PARTS = ("workloads", "ablations", "decisions", "load", "rates")
QUICK_PARTS = PARTS[:4]
DEFINITIONS = {
    "cpr": "Mean over streams of the share of chunks that are there when the viewer needs them. Playing "
    "starts 4 T after the request, and a stall shifts what follows.",
    "cpr_no_buffer": "The same for a viewer that plays from the first chunk on.",
    "ttfc_s": "Time from the request to the first chunk at the viewer.",
    "quality": "Mean quality of all chunks; 1 is the best configuration's.",
    "rate": "Arrivals of streams per second for each 16 workers.",
    "sp_events": "Workers of the simulation lend nothing: null.",
    "not_built": "What a row lacks. Such a row is not run.",
}


def run(
    quick: Annotated[
        bool, typer.Option("--quick", help="16 workers, short workloads, two seeds, no rates.")
    ] = False,
    only: Annotated[str, typer.Option(help=f"Parts to run, separated by commas: {', '.join(PARTS)}.")] = "",
    policies: Annotated[str, typer.Option(help="Policies to run, separated by commas.")] = "",
    workloads: Annotated[str, typer.Option(help="Workloads to run, separated by commas.")] = "",
    profile: Annotated[str, typer.Option(help=f"Declared device: {', '.join(PROFILES)}.")] = "paper",
    seeds: Annotated[int, typer.Option(min=0, help="Number of seeds. 0: by size.")] = 0,
    first_seed: Annotated[int, typer.Option(min=0, help="First seed.")] = FIRST_SEED,
    streams: Annotated[int, typer.Option(min=0, help="Streams of a run with 16 workers. 0: by size.")] = 0,
    rate: Annotated[float, typer.Option(min=0.01, help="Arrivals per second for each 16 workers.")] = 1.0,
    jobs: Annotated[int, typer.Option(min=0, help="Number of processes; 0 for one per core.")] = 1,
    cells: Annotated[Path | None, typer.Option(help="Folder that keeps finished runs.")] = None,
    real: Annotated[
        bool,
        typer.Option("--real", help="Instead, play sessions on a real stack with paced workers."),
    ] = False,
) -> dict[str, Any]:
    """Compare policies that use playout slack on SlackServe's workloads.

    All services run in virtual time on declared devices. With `--cells`, a run that was cut off continues.

    `--real` compares the fidelity policies `best` and `in-time` on a real stack of two toyworld workers whose
    forwards are slowed down, with 30 % more sessions than they carry at best fidelity. Only `--quick` and
    `--first-seed` count then.
    """
    if real:
        return run_real(quick, first_seed)
    parts = _chosen("only", only, PARTS) if only else list(QUICK_PARTS if quick else PARTS)
    rows = _chosen("policies", policies, tuple(POLICIES)) if policies else list(MAIN)
    loads = _chosen("workloads", workloads, tuple(WORKLOADS))
    if profile not in PROFILES:
        raise BenchError(f"--profile: unknown device {profile!r}; known: {', '.join(PROFILES)}")
    ablated = rows if policies else list(ABLATIONS)
    lacking = {name: POLICIES[name].not_built for name in dict.fromkeys([*rows, *ablated])}
    built = [name for name in rows if lacking[name] is None]
    base = Cell(profile, "steady", "", 16, streams or (QUICK_STREAMS if quick else STREAMS), rate, 0)
    numbers = range(first_seed, first_seed + (seeds or (QUICK_SEEDS if quick else SEEDS)))
    began_s = time.monotonic()
    runnable = [name for name in ablated if lacking[name] is None]
    result: dict[str, Any] = {
        "definitions": DEFINITIONS,
        "profile": profile,
        "chunk_s": PROFILES[profile]().chunk_s,
        "source": source_digest(),
        "seeds": list(numbers),
        "not_built": {name: reason for name, reason in lacking.items() if reason is not None},
        "meaning": {name: POLICIES[name].meaning for name in lacking},
    }
    most = len(numbers) * _most_cells(parts, quick, len(loads), len(built), len(runnable))
    with progress_bar(most) as done:
        # A bisection that ends early leaves some of the cells out.
        store = CellStore(cells, lambda cell: done(_describe(cell)))

        def of(cell: Cell) -> list[CellResult]:
            cell = replace(cell, policy=SAME_RUNS.get(cell.policy, cell.policy))
            each = [replace(cell, seed=seed) for seed in numbers]
            return list(store.run(each, jobs or os.cpu_count() or 1).values())

        result |= _parts(of, base, parts, quick, loads, rows, ablated, lacking, first_seed)
    result["seconds"] = round(time.monotonic() - began_s, 1)
    return result


def _describe(cell: Cell) -> str:
    return f"{cell.workload} {cell.policy} rate {cell.rate:g} seed {cell.seed}"


def _parts(
    of: Callable[[Cell], list[CellResult]],
    base: Cell,
    parts: Sequence[str],
    quick: bool,
    loads: Sequence[str],
    rows: Sequence[str],
    ablated: Sequence[str],
    lacking: Mapping[str, str | None],
    first_seed: int,
) -> dict[str, Any]:
    """Return the results by part. `of` runs a cell with all seeds."""
    result: dict[str, Any] = {}
    built = [name for name in rows if lacking[name] is None]
    if "workloads" in parts:
        result["workloads"] = _workloads(of, base, loads, rows, lacking)
        if not quick:
            large = replace(base, workers=64, streams=2 * base.streams)
            result["workloads_64_workers"] = _workloads(of, large, loads, rows, lacking)
    if "rates" in parts:
        each = [replace(base, rate=one) for one in RATES]
        result["rates"] = {
            f"{cell.rate:g}": {name: figures(of(replace(cell, policy=name))) for name in built}
            for cell in each
        }
    if "ablations" in parts:
        result["ablations"] = {name: _row(of, replace(base, policy=name), lacking[name]) for name in ablated}
    if "decisions" in parts:
        result["decision_time"] = {
            name: decision_times(PROFILES[base.profile](), name, TICKS, first_seed) for name in DECIDERS
        }
    if "load" in parts:
        result["load_at_cpr_95"] = {name: _load(of, replace(base, policy=name)) for name in built}
    return result


def _most_cells(parts: Sequence[str], quick: bool, loads: int, built: int, ablated: int) -> int:
    """Return the largest number of cells of one seed."""
    by_part = {
        "workloads": loads * built * (1 if quick else 2),
        "rates": len(RATES) * built,
        "ablations": ablated,
        "load": built * (STEPS + 2),
    }
    return sum(by_part.get(part, 0) for part in parts)


def figures(results: Sequence[CellResult]) -> dict[str, Any]:
    """Return the figures of one row over its seeds, with 95 % intervals in `ci95`."""
    found = summarize([each.metrics for each in results])
    row = {name: value["mean"] for name, value in found.items()}
    widths = {name: value["ci95"] for name, value in found.items()}
    migrations = interval([float(each.migrations) for each in results])
    return {
        "cpr": row["cpr"],
        "cpr_no_buffer": row["cpr_no_buffer"],
        "ttfc_s": {"mean": row["ttfc_mean_s"], "p95": row["ttfc_p95_s"]},
        "stalls_per_stream": row["stalls_per_stream"],
        "stall_s": row["stall_s"],
        "quality": row["quality"],
        "least_quality": min(each.metrics.least_quality for each in results),
        "migrations": migrations["mean"],
        "sp_events": None,
        "incomplete": row["incomplete"],
        "violations": sum(each.violations for each in results),
        "ci95": {**widths, "migrations": migrations["ci95"]},
    }


def _workloads(
    of: Callable[[Cell], list[CellResult]],
    base: Cell,
    loads: Sequence[str],
    rows: Sequence[str],
    lacking: Mapping[str, str | None],
) -> dict[str, Any]:
    return {
        load: {name: _row(of, replace(base, workload=load, policy=name), lacking[name]) for name in rows}
        for load in loads
    }


def _row(of: Callable[[Cell], list[CellResult]], cell: Cell, not_built: str | None) -> dict[str, Any]:
    return figures(of(cell)) if not_built is None else {"not_built": not_built}


def _load(of: Callable[[Cell], list[CellResult]], cell: Cell) -> float | None:
    """Return the highest rate at which the mean CPR is at least 0.95; None if the least is too high."""
    return highest_rate(
        lambda rate: (
            summarize([each.metrics for each in of(replace(cell, rate=rate))])["cpr"]["mean"] >= WANTED_CPR
        )
    )


def _chosen(option: str, given: str, known: Sequence[str]) -> list[str]:
    wanted = [name.strip() for name in given.split(",") if name.strip()] or list(known)
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise BenchError(f"--{option}: {unknown[0]!r} is not known; known: {', '.join(known)}")
    return wanted


def table(result: Mapping[str, Any]) -> Table:
    """Format the rows by workload, and the highest load, or the runs of a real stack."""
    if "runs" in result:
        return real_table(result)
    shown = Table("workload", "policy", "CPR", "TTFC, s", "stalls", "quality", "moves", box=box.SIMPLE)
    for key in ("workloads", "workloads_64_workers", "rates"):
        for load, rows in result.get(key, {}).items():
            for name, row in rows.items():
                shown.add_row(f"{key.removeprefix('workloads')} {load}".strip(), name, *_cells(row))
    for name, row in result.get("ablations", {}).items():
        shown.add_row("ablations", name, *_cells(row))
    for names, counts in result.get("decision_time", {}).items():
        for count, times in counts.items():
            one, split, whole = times.values()
            shown.add_row(
                f"decision, {count}",
                names,
                f"p50, p99: {one['p50_ms']:.2f}, {one['p99_ms']:.2f} ms on one worker",
                f"{split['p50_ms']:.2f}, {split['p99_ms']:.2f} ms with 16 each",
                f"{whole['p50_ms']:.1f}, {whole['p99_ms']:.1f} ms all of these",
            )
    for name, rate in result.get("load_at_cpr_95", {}).items():
        shown.add_row("load at CPR 0.95", name, "none" if rate is None else f"{rate:.2f}")
    return shown


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "not_built" in row:
        return [f"not built: {row['not_built']}"]
    width = row["ci95"]["cpr"]
    return [
        f"{row['cpr']:.3f}" + ("" if width is None else f" ± {width:.3f}"),
        f"{row['ttfc_s']['mean']:.2f}",
        f"{row['stalls_per_stream']:.2f}",
        f"{row['quality']:.3f}",
        f"{row['migrations']:.0f}",
    ]

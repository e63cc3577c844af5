"""SlackServe's workloads and policies on the simulator: chunks in time, first chunks, stalls, quality."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from turboserve.bench.report import BenchError
from turboserve.experiments.progress import progress_bar
from turboserve.experiments.slack.cell_store import CellStore, source_digest
from turboserve.experiments.slack.cells import Cell, CellResult
from turboserve.experiments.slack.decisions import POLICIES as DECIDERS
from turboserve.experiments.slack.decisions import decision_times
from turboserve.experiments.slack.load import LEAST_RATE, MOST_RATE, LoadSearch, load_ratios
from turboserve.experiments.slack.metrics import interval, summarize
from turboserve.experiments.slack.policies import POLICIES, SAME_RUNS, SIDE
from turboserve.experiments.slack.profiles import PROFILES
from turboserve.experiments.slack.real import run_real
from turboserve.experiments.slack.real import table as real_table
from turboserve.experiments.slack.rows import FULL, QUICK, WORKLOAD_PARTS, Row, rows_of
from turboserve.experiments.slack.workloads import WORKLOADS
from turboserve.simulation.huge_pages import use_huge_pages

FIRST_SEED = 100
"""Seeds below this were used for tuning."""
WANTED_CPR = 0.95
TICKS = 20
"""Number of states in which each decision is timed."""
PARTS = (*WORKLOAD_PARTS, "decisions", "load")
DEFINITIONS = {
    "cpr": "Mean over streams of the share of chunks that are there when the viewer needs them. Playing "
    "starts 4 T after the request, and a stall shifts what follows.",
    "cpr_no_buffer": "The same for a viewer that plays from the first chunk on.",
    "ttfc_s": "Time from the request to the first chunk at the viewer.",
    "quality": "Mean quality of all chunks; 1 is the best configuration's.",
    "rate": "Arrivals of streams per second for each 16 workers.",
    "sp_events": "Loans of a device to another worker's session (sequence parallelism of degree 2).",
    "load_at_cpr_95": "Highest rate with a mean CPR of at least 0.95, steady, by bisection between "
    f"{LEAST_RATE:g} and {MOST_RATE:g}; null if the least one is too high.",
    "load_ratio": "That of `ours` over the best of sdv2, ts and ts_chunk, and over that of slackserve.",
    "not_built": "What a row lacks. Such a row is not run.",
}


def run(
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Short workloads, two seeds or one, 64 workers with one workload."),
    ] = False,
    only: Annotated[str, typer.Option(help=f"Parts to run, separated by commas: {', '.join(PARTS)}.")] = "",
    policies: Annotated[str, typer.Option(help="Policies to run, separated by commas.")] = "",
    workloads: Annotated[str, typer.Option(help="Workloads to run, separated by commas.")] = "",
    profile: Annotated[str, typer.Option(help=f"Declared device: {', '.join(PROFILES)}.")] = "paper",
    seeds: Annotated[int, typer.Option(min=0, help="Number of seeds. 0: by size.")] = 0,
    first_seed: Annotated[int, typer.Option(min=0, help="First seed.")] = FIRST_SEED,
    streams: Annotated[int, typer.Option(min=0, help="Streams of a run with 16 workers. 0: by size.")] = 0,
    rate: Annotated[float, typer.Option(min=0.01, help="Arrivals per second for each 16 workers.")] = 1.0,
    jobs: Annotated[int, typer.Option(min=0, help="Number of processes; 0 for one per core.")] = 0,
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
    parts = _chosen("only", only, PARTS)
    names = _chosen("policies", policies, tuple(POLICIES)) if policies else []
    loads = _chosen("workloads", workloads, tuple(WORKLOADS))
    if profile not in PROFILES:
        raise BenchError(f"--profile: unknown device {profile!r}; known: {', '.join(PROFILES)}")
    size = QUICK if quick else FULL
    if seeds:
        size = replace(size, seeds=seeds, side_seeds=seeds)
    if streams:
        size = replace(size, streams=streams, load_streams=streams)
    base = Cell(profile, "steady", "", 16, size.streams, rate, 0)
    rows = rows_of(parts, base, size, loads, names)
    compared = (names or list(SIDE)) if "load" in parts else []
    used = dict.fromkeys([*(row.cell.policy for row in rows), *compared])
    lacking = {name: reason for name in used if (reason := POLICIES[name].not_built) is not None}
    numbers = list(range(first_seed, first_seed + size.seeds))
    jobs = jobs or os.cpu_count() or 1
    if jobs == 1 and "decisions" not in parts:
        use_huge_pages()
    began_s, began_cpu_s = time.monotonic(), _cpu_s()
    result: dict[str, Any] = {
        "definitions": DEFINITIONS,
        "profile": profile,
        "chunk_s": PROFILES[profile]().chunk_s,
        "source": source_digest(),
        "seeds": numbers,
        "side_seeds": numbers[: size.side_seeds],
        "streams": {"workloads": size.streams, "load": size.load_streams},
        "not_built": lacking,
        "meaning": {name: POLICIES[name].meaning for name in used},
    }
    wanted = {row: _cells_of(row, numbers) for row in rows if row.cell.policy not in lacking}
    most = sum(map(len, wanted.values())) + len(compared) * len(numbers) * (size.halvings + 1)
    # A bisection that ends early leaves some of the cells out.
    with (
        progress_bar(most) as done,
        CellStore(cells, jobs, lambda cell: done(_describe(cell))) as store,
    ):
        found = store.run(cell for each in wanted.values() for cell in each)
        for row in rows:
            _put(result, row, [found[cell] for cell in wanted[row]] if row in wanted else None)
        if "decisions" in parts:
            result["decision_time"] = {
                name: decision_times(PROFILES[profile](), name, TICKS, first_seed) for name in DECIDERS
            }
        if "load" in parts:
            search = LoadSearch(store.bounds, numbers, WANTED_CPR, size.halvings)
            starts = {
                name: replace(base, policy=SAME_RUNS.get(name, name), streams=size.load_streams)
                for name in compared
                if name not in lacking
            }
            with ThreadPoolExecutor(jobs) as threads:
                highest = dict(zip(starts, threads.map(search.highest, starts.values()), strict=True))
            result |= {"load_at_cpr_95": highest, "load_ratio": load_ratios(highest)}
    result["seconds"] = round(time.monotonic() - began_s, 1)
    result["cpu_seconds"] = round(_cpu_s() - began_cpu_s, 1)
    return result


def _cpu_s() -> float:
    """Return the processor time of this process and of its ended children, seconds."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _describe(cell: Cell) -> str:
    return f"{cell.workload} {cell.policy} rate {cell.rate:g} seed {cell.seed}"


def _cells_of(row: Row, seeds: Sequence[int]) -> list[Cell]:
    cell = replace(row.cell, policy=SAME_RUNS.get(row.cell.policy, row.cell.policy))
    return [replace(cell, seed=seed) for seed in seeds[: row.seeds]]


def _put(result: dict[str, Any], row: Row, runs: Sequence[CellResult] | None) -> None:
    """Add a row to the report. `runs`: None: its policy cannot be run."""
    at = result
    for key in row.path[:-1]:
        at = at.setdefault(key, {})
    reason = result["not_built"].get(row.cell.policy)
    at[row.path[-1]] = {"not_built": reason} if runs is None else figures(runs)


def figures(results: Sequence[CellResult]) -> dict[str, Any]:
    """Return the figures of one row over its seeds, with 95 % intervals in `ci95`."""
    found = summarize([each.metrics for each in results])
    row = {name: value["mean"] for name, value in found.items()}
    widths = {name: value["ci95"] for name, value in found.items()}
    migrations = interval([float(each.migrations) for each in results])
    loans = interval([float(each.loans) for each in results])
    return {
        "cpr": row["cpr"],
        "cpr_no_buffer": row["cpr_no_buffer"],
        "ttfc_s": {"mean": row["ttfc_mean_s"], "p95": row["ttfc_p95_s"]},
        "stalls_per_stream": row["stalls_per_stream"],
        "stall_s": row["stall_s"],
        "quality": row["quality"],
        "least_quality": min(each.metrics.least_quality for each in results),
        "migrations": migrations["mean"],
        "sp_events": loans["mean"],
        "incomplete": row["incomplete"],
        "violations": sum(each.violations for each in results),
        "ci95": {**widths, "migrations": migrations["ci95"], "sp_events": loans["ci95"]},
    }


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
    for key in ("workloads", "workloads_64_workers", "rates", "profiles"):
        for load, rows in result.get(key, {}).items():
            for name, row in rows.items():
                shown.add_row(f"{key.removeprefix('workloads')} {load}".strip(), name, *_cells(row))
    for key in ("ablations", "alpha"):
        for name, row in result.get(key, {}).items():
            shown.add_row(key, name, *_cells(row))
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

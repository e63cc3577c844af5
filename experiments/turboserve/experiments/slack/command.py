"""SlackServe's workloads and policies on the simulator: chunks in time, first chunks, stalls, quality."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from turboserve.experiments.slack.policies import ABLATIONS, COMPARED, MAIN, POLICIES, QUICK, SAME_RUNS, SWEEP
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
LARGE_WORKERS = 64
PARTS = ("workloads", "ablations", "alpha", "decisions", "load", "rates", "large", "profiles")
QUICK_PARTS = PARTS[:5]
DEFINITIONS = {
    "cpr": "Mean over streams of the share of chunks that are there when the viewer needs them. Playing "
    "starts 4 T after the request, and a stall shifts what follows.",
    "cpr_no_buffer": "The same for a viewer that plays from the first chunk on.",
    "ttfc_s": "Time from the request to the first chunk at the viewer.",
    "quality": "Mean quality of all chunks; 1 is the best configuration's.",
    "rate": "Arrivals of streams per second for each 16 workers.",
    "sp_events": "Loans of a device to another worker's session (sequence parallelism of degree 2).",
    "load_at_cpr_95": "Highest rate with a mean CPR of at least 0.95; null if the least one is too high.",
    "load_ratio": "That of `ours` over the best of sdv2, ts and ts_chunk, and over that of slackserve.",
    "not_built": "What a row lacks. Such a row is not run.",
}


def run(
    quick: Annotated[
        bool,
        typer.Option("--quick", help="16 workers, short workloads, two seeds, fewer parts and policies."),
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
    rows = _chosen("policies", policies, tuple(POLICIES)) if policies else list(QUICK if quick else MAIN)
    loads = _chosen("workloads", workloads, tuple(WORKLOADS))
    if profile not in PROFILES:
        raise BenchError(f"--profile: unknown device {profile!r}; known: {', '.join(PROFILES)}")
    ablated = rows if policies else list(ABLATIONS)
    swept = list(SWEEP) if "alpha" in parts else []
    compared = rows if policies else list(COMPARED if quick else rows)
    lacking = {name: POLICIES[name].not_built for name in dict.fromkeys([*rows, *ablated, *swept])}
    base = Cell(profile, "steady", "", 16, streams or (QUICK_STREAMS if quick else STREAMS), rate, 0)
    numbers = range(first_seed, first_seed + (seeds or (QUICK_SEEDS if quick else SEEDS)))
    began_s = time.monotonic()
    result: dict[str, Any] = {
        "definitions": DEFINITIONS,
        "profile": profile,
        "chunk_s": PROFILES[profile]().chunk_s,
        "source": source_digest(),
        "seeds": list(numbers),
        "not_built": {name: reason for name, reason in lacking.items() if reason is not None},
        "meaning": {name: POLICIES[name].meaning for name in lacking},
    }
    chosen = SelectedRows(rows, ablated, swept, compared)
    most = len(numbers) * _most_cells(parts, len(loads), chosen)
    with progress_bar(most) as done:
        # A bisection that ends early leaves some of the cells out.
        store = CellStore(cells, lambda cell: done(_describe(cell)))

        def of(cell: Cell) -> list[CellResult]:
            cell = replace(cell, policy=SAME_RUNS.get(cell.policy, cell.policy))
            each = [replace(cell, seed=seed) for seed in numbers]
            return list(store.run(each, jobs or os.cpu_count() or 1).values())

        result |= _parts(of, base, parts, loads, chosen, lacking, first_seed)
    result["seconds"] = round(time.monotonic() - began_s, 1)
    return result


def _describe(cell: Cell) -> str:
    return f"{cell.workload} {cell.policy} rate {cell.rate:g} seed {cell.seed}"


@dataclass(frozen=True)
class SelectedRows:
    """The rows of each part."""

    rows: Sequence[str]
    """Rows of every workload."""
    ablated: Sequence[str]
    swept: Sequence[str]
    """Rows of the sweep of α."""
    compared: Sequence[str]
    """Rows whose highest load is looked for."""


def _parts(
    of: Callable[[Cell], list[CellResult]],
    base: Cell,
    parts: Sequence[str],
    loads: Sequence[str],
    chosen: SelectedRows,
    lacking: Mapping[str, str | None],
    first_seed: int,
) -> dict[str, Any]:
    """Return the results by part. `of` runs a cell with all seeds."""

    def all_of(cell: Cell, names: Sequence[str]) -> dict[str, Any]:
        return {name: _row(of, replace(cell, policy=name), lacking[name]) for name in names}

    result: dict[str, Any] = {}
    if "workloads" in parts:
        result["workloads"] = {load: all_of(replace(base, workload=load), chosen.rows) for load in loads}
    if "large" in parts:
        large = replace(base, workers=LARGE_WORKERS, streams=2 * base.streams)
        result["workloads_64_workers"] = {
            load: all_of(replace(large, workload=load), chosen.rows) for load in loads
        }
    if "rates" in parts:
        result["rates"] = {f"{rate:g}": all_of(replace(base, rate=rate), chosen.rows) for rate in RATES}
    if "profiles" in parts:
        others = [name for name in PROFILES if name != base.profile]
        result["profiles"] = {name: all_of(replace(base, profile=name), chosen.rows) for name in others}
    if "ablations" in parts:
        result["ablations"] = all_of(base, chosen.ablated)
    if "alpha" in parts:
        result["alpha"] = all_of(base, chosen.swept)
    if "decisions" in parts:
        result["decision_time"] = {
            name: decision_times(PROFILES[base.profile](), name, TICKS, first_seed) for name in DECIDERS
        }
    if "load" in parts:
        found = {
            name: _load(of, replace(base, policy=name)) for name in chosen.compared if lacking[name] is None
        }
        result["load_at_cpr_95"] = found
        result["load_ratio"] = load_ratios(found)
    return result


def _most_cells(parts: Sequence[str], loads: int, chosen: SelectedRows) -> int:
    """Return the largest number of cells of one seed."""
    rows = len(chosen.rows)
    by_part = {
        "workloads": loads * rows,
        "large": loads * rows,
        "rates": len(RATES) * rows,
        "profiles": (len(PROFILES) - 1) * rows,
        "ablations": len(chosen.ablated),
        "alpha": len(chosen.swept),
        "load": len(chosen.compared) * (STEPS + 2),
    }
    return sum(by_part.get(part, 0) for part in parts)


def load_ratios(found: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the load of `ours` over those of others. None: one of the two carries no load."""
    ours = found.get("ours")

    def over(*names: str) -> float | None:
        others = [rate for name in names if (rate := found.get(name)) is not None]
        return None if ours is None or not others else ours / max(others)

    return {"static": over("sdv2", "ts", "ts_chunk"), "slackserve": over("slackserve")}


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

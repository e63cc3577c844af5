"""The evaluation of TurboServe, NeuStream and SlackServe, replayed beside the published numbers."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from turboserve.bench.report import BenchError
from turboserve.experiments.paper import (
    batching,
    calm,
    figure4,
    figure7,
    figure8,
    figure9,
    headroom,
    sensitivity,
    slackserve,
    table2,
    table3,
    table4,
    table5_6,
    table7_10,
    timeline,
)
from turboserve.experiments.paper.experiment import DRAWS, QUICK_DRAWS, Experiment, Scale
from turboserve.experiments.progress import progress_bar
from turboserve.experiments.result_folder import PaperCell, ResultFolder
from turboserve.experiments.slack.cell_store import source_digest

EXPERIMENTS: Mapping[str, Experiment] = {
    table2.NAME: table2,
    table5_6.NAME: table5_6,
    table7_10.NAME: table7_10,
    table3.NAME: table3,
    table4.NAME: table4,
    figure9.NAME: figure9,
    figure4.NAME: figure4,
    figure7.NAME: figure7,
    figure8.NAME: figure8,
    sensitivity.NAME: sensitivity,
    batching.NAME: batching,
    slackserve.NAME: slackserve,
    timeline.NAME: timeline,
    headroom.NAME: headroom,
    calm.NAME: calm,
}
DEFINITIONS = {
    "engine": "The product's controller, placement and rebalancer on a virtual clock (`bench autoscale`): "
    "workers are declared latencies. The numbers do not depend on the machine, except times of decisions.",
    "cost_worker_s": "Worker-seconds from launch to release. Starting and draining workers count.",
    "served_ms": "Worst latency of a chunk of a session on a worker.",
    "with_waits_ms": "The same, with the wait for a slot and the pause of a migration.",
    "late_percent": "Chunks above the target (first chunks of activations, waits included, and next chunks "
    "after migrations) per 100 activations.",
    "interval": "95 % by Student's distribution over the draws of the traces.",
    "error": "In the place of a report that failed. Its runs are in `cells`.",
    "ratio": "Our number relative to the published one.",
    "wanted": "Limits that were fixed before the first run. `met`: whether the mean is within them.",
}


def run(
    only: Annotated[
        str, typer.Option(help=f"Experiments to run, separated by commas: {', '.join(EXPERIMENTS)}.")
    ] = "",
    quick: Annotated[
        bool,
        typer.Option("--quick", help=f"{QUICK_DRAWS} draws, not {DRAWS}; fewer traces and start-ups."),
    ] = False,
    draws: Annotated[int, typer.Option(min=0, help="Number of draws of each trace. 0: by size.")] = 0,
    first_seed: Annotated[int, typer.Option(min=0, help="Seed of the first draw.")] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Number of processes; 0 for one per core.")] = 1,
    cells: Annotated[
        Path | None, typer.Option(help="Folder that keeps finished runs, so that a run can continue.")
    ] = None,
) -> dict[str, Any]:
    """Replay TurboServe's evaluation on declared workers, and compare it with the published numbers.

    All systems have the same traces, plants, signals and grids of settings.
    """
    wanted = [name.strip() for name in only.split(",") if name.strip()] or list(EXPERIMENTS)
    unknown = sorted(set(wanted) - EXPERIMENTS.keys())
    if unknown:
        known = ", ".join(EXPERIMENTS)
        raise BenchError(f"--only: unknown experiment {unknown[0]!r}; known: {known}")
    scale = Scale(quick, draws, first_seed)
    units = {name: EXPERIMENTS[name].cells(scale) for name in wanted}
    began_s = time.monotonic()
    folder = ResultFolder(cells)
    reports = {}
    with progress_bar(sum(len(each) for each in units.values())) as done:
        for name, its in units.items():
            found = folder.run(its, jobs or os.cpu_count() or 1, done)
            ordered = {cell: found[cell] for cell in its}
            reports[name] = {
                **_report(EXPERIMENTS[name], scale, ordered),
                "cells": {cell.key: result for cell, result in ordered.items()},
            }
    return {
        "definitions": DEFINITIONS,
        "source": source_digest(),
        "quick": quick,
        "seeds": list(scale.seeds),
        "seconds": round(time.monotonic() - began_s, 1),
        "experiments": reports,
    }


def _report(experiment: Experiment, scale: Scale, results: Mapping[PaperCell, Any]) -> dict[str, Any]:
    """Return the report, or `error` with its reason: the other experiments and all runs remain."""
    try:
        return experiment.report(scale, results)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def table(result: Mapping[str, Any]) -> Table:
    """Format the published numbers and ours."""
    shown = Table("experiment", "what", "paper", "ours", box=box.SIMPLE)
    for name, found in result["experiments"].items():
        if "error" in found:
            shown.add_row(name, "no report", "", found["error"])
            continue
        for row in EXPERIMENTS[name].rows(found):
            shown.add_row(name, *row)
    return shown

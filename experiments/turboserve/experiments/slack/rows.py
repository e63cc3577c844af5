"""The rows of the comparison by part: which cell each one runs, and with how many seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from turboserve.experiments.slack.cells import Cell
from turboserve.experiments.slack.policies import ABLATIONS, MAIN, SIDE, SWEEP
from turboserve.experiments.slack.policies import QUICK as QUICK_ROWS
from turboserve.experiments.slack.profiles import PROFILES

RATES = (0.6, 1.0, 1.4, 1.8, 2.2)
LARGE_WORKERS = 64
LARGE_STREAMS = 2
"""Streams of a run with 64 workers, as a multiple of one with 16."""
WORKLOAD_PARTS = ("workloads", "large", "rates", "profiles", "ablations", "alpha")
"""Parts that have rows of figures."""


@dataclass(frozen=True)
class RunSize:
    """Extent of the comparison."""

    streams: int
    """Streams of a run with 16 workers."""
    load_streams: int
    """Those of a run of the bisection."""
    seeds: int
    """Seeds of the workloads and of the bisection."""
    side_seeds: int
    """Seeds of the other parts."""
    halvings: int
    rows: Sequence[str]
    """Policies of the workloads."""
    large_workloads: Sequence[str]
    """Workloads with 64 workers."""


FULL = RunSize(120, 120, 5, 5, 6, MAIN, ("steady", "burst"))
QUICK = RunSize(40, 80, 2, 1, 5, QUICK_ROWS, ("steady",))


@dataclass(frozen=True)
class Row:
    """One row of the report."""

    path: tuple[str, ...]
    """Keys under which the report has the row."""
    cell: Cell
    """Its run, but for the seed."""
    seeds: int


def rows_of(
    parts: Sequence[str], base: Cell, size: RunSize, workloads: Sequence[str], policies: Sequence[str]
) -> list[Row]:
    """Return the rows of the parts. `policies`: the ones of every part; empty: each part's own."""
    side = policies or SIDE
    found: list[Row] = []

    def add(path: tuple[str, ...], cell: Cell, names: Sequence[str], seeds: int) -> None:
        found.extend(Row((*path, name), replace(cell, policy=name), seeds) for name in names)

    if "workloads" in parts:
        for load in workloads:
            add(("workloads", load), replace(base, workload=load), policies or size.rows, size.seeds)
    if "large" in parts:
        large = replace(base, workers=LARGE_WORKERS, streams=LARGE_STREAMS * base.streams)
        for load in [load for load in workloads if load in size.large_workloads] or workloads[:1]:
            add(("workloads_64_workers", load), replace(large, workload=load), side, size.side_seeds)
    if "rates" in parts:
        for rate in RATES:
            add(("rates", f"{rate:g}"), replace(base, rate=rate), side, size.side_seeds)
    if "profiles" in parts:
        for name in PROFILES:
            add(("profiles", name), replace(base, profile=name), side, size.side_seeds)
    if "ablations" in parts:
        add(("ablations",), base, policies or ABLATIONS, size.side_seeds)
    if "alpha" in parts:
        add(("alpha",), base, SWEEP, size.side_seeds)
    return found

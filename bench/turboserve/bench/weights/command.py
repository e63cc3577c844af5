"""Weights from other workers: makespans of transfer plans, and starts of real workers."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich import box
from rich.console import Group
from rich.table import Table

from turboserve.bench.report import BenchError
from turboserve.bench.weights import plans
from turboserve.bench.weights.starts import starts

GB = 10**9
PARTS = ("plans", "small", "disturbances", "starts")
DEFINITIONS = {
    "plans": "Seconds until the last receiver has all weights, in virtual time. Declared networks: 400 GB/s "
    "within a host, 25 GB/s between hosts, each worker and direction.",
    "ours": "The product's plan.",
    "oserve": "OServe's Algorithm 2: the source that has sent least to this receiver. No receiver sends.",
    "oserve_in_total": "The same with the source that has sent least in total, as the paper's text says.",
    "far_bytes": "Bytes between hosts.",
    "most_sent_bytes": "What the busiest worker sends.",
    "gain": "Makespan of `oserve` over that of `ours`.",
    "cpu_s": "Processor time of our plan's decisions and of the simulated network together.",
    "small": "Rounds: each worker sends and receives at most one shard a round. `best` is the least of all "
    "plans, by search; `bound` is a lower bound for any size.",
    "disturbances": "Two holders, six receivers, each on a host of its own.",
    "bytes_without_slack": "Bytes that a holder sends while its viewers lack slack.",
    "starts": "Starts of worker processes with padded weights beside one worker that serves the model and no "
    "session: medians. `peers`: from that worker. `warm`: from a file in the page cache. `cold`: from "
    "a file that was dropped from the page cache.",
    "read_bytes": "Bytes that the process caused to be read from storage.",
}


def run(
    quick: Annotated[bool, typer.Option("--quick", help="16 shards instead of 64.")] = False,
    only: Annotated[str, typer.Option(help=f"Parts to run, separated by commas: {', '.join(PARTS)}.")] = "",
    gigabytes: Annotated[float, typer.Option(min=0.001, help="Weights of the declared model, GB.")] = 16.0,
    padded_bytes: Annotated[
        int, typer.Option(min=1 << 16, help="Padding of the weights in `starts`, bytes.")
    ] = 10**9,
    rounds: Annotated[int, typer.Option(min=0, help="Starts of each kind. 0: 5, or 1 with --quick.")] = 0,
    backend: Annotated[str, typer.Option(help="Transfer backend of `starts`: gloo or shm.")] = "gloo",
) -> dict[str, Any]:
    """Compare plans of weight transfers, and start real workers with weights from a peer and from disk.

    The plans are ours, OServe's, and on small cases the best of all, in virtual time.
    """
    parts = [name.strip() for name in only.split(",") if name.strip()] or list(PARTS)
    if unknown := sorted(set(parts) - set(PARTS)):
        raise BenchError(f"--only: {unknown[0]!r} is not known; known: {', '.join(PARTS)}")
    shards, size = (16 if quick else 64), round(gigabytes * GB)
    result: dict[str, Any] = {"definitions": DEFINITIONS, "shards": shards, "bytes": size}
    if "plans" in parts:
        result["plans"] = plans.makespans(shards, size)
    if "small" in parts:
        result["small"] = plans.small_cases()
    if "disturbances" in parts:
        result["disturbances"] = plans.disturbances(shards, size)
    if "starts" in parts:
        if backend not in ("gloo", "shm"):
            raise BenchError(f"--backend: {backend!r} is not gloo or shm")
        result |= {"padded_bytes": padded_bytes, "backend": backend}
        result["starts"] = starts(padded_bytes, rounds or (1 if quick else 5), backend)
    return result


def table(result: dict[str, Any]) -> Group:
    """Format the result: one table for each part."""
    rows = {
        "plans": lambda one: {
            **{f"{name}, s": value for name, value in one["seconds"].items()},
            "gain": one["gain"],
            **{f"{name}, GB far": one["far_bytes"][name] / GB for name in ("ours", "oserve")},
        },
        "small": dict,
        "disturbances": lambda one: {
            "seconds": one["seconds"],
            "GB without slack": one["bytes_without_slack"] / GB,
        },
        "starts": lambda one: {
            **{f"{part}, s": one[f"{part}_s"] for part in ("import", "weights", "warm_up", "total")},
            "GB read": one["read_bytes"] / GB,
        },
    }
    return Group(
        *(
            _table(part, {case: row(one) for case, one in result[part].items()})
            for part, row in rows.items()
            if part in result
        )
    )


def _table(part: str, cases: dict[str, dict[str, Any]]) -> Table:
    made = Table(title=part, box=box.SIMPLE)
    made.add_column("case", no_wrap=True)
    for column in next(iter(cases.values())):
        made.add_column(column, justify="right")
    for case, values in cases.items():
        made.add_row(case, *(f"{value:.4g}" for value in values.values()))
    return made

"""The gather policies on a virtual clock: chunk latency and stalls by load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from turboserve.bench.report import percentile
from turboserve.experiments.batching.simulation import BatchingScenario, capacity, poisson, simulate
from turboserve.worker.engine.gather import GATHER_POLICIES, LatencyProfile

POLICIES = ("fcfs", "chunk", "partial-deadlines", "earliest-fluid-finish", "step")
LOADS = (0.2, 0.4, 0.6, 0.8, 0.9)
FORWARDS = 5
SLACK_CHUNKS = 4.0
"""Playout slack of a chunk that becomes due, in chunks made alone (SlackServe, Appendix C)."""
GIVEN = {
    "batch_friendly": {size: 0.0185 + 0.0015 * size for size in range(1, 17)},
    "compute_bound": {size: 0.0002 + 0.0378 * size for size in range(1, 17)},
}
"""Seconds of a forward by batch size.

`compute_bound` is 1.3 B on an H200: 190 ms a chunk, linear in the size.
"""


def run(
    chunks: Annotated[
        int, typer.Option(min=100, help="Number of chunks per profile, load and policy.")
    ] = 3000,
    slots: Annotated[int, typer.Option(min=1, max=64, help="Maximum number of sessions in the engine.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the arrivals.")] = 0,
    measured: Annotated[
        bool, typer.Option(help="Also use the shipped model's latencies, measured on this machine.")
    ] = True,
) -> dict[str, Any]:
    """Measure latency and stalls of the gather policies on a virtual clock.

    Runs the engine's own gather code with given L(b).
    """
    given = dict(GIVEN)
    if measured:
        from turboserve.bench.engine.models import toyworld_forward_profile

        given["measured"] = toyworld_forward_profile()
    return {
        "definitions": {
            "load": "Rate at which chunks become due, divided by max over b of b / (forwards * L(b)).",
            "latency": "Time from due to the end of the last forward, including the wait for a slot.",
            "stall": "Latency above the playout slack: the time of four chunks at batch size 1.",
        },
        "forwards": FORWARDS,
        "slots": slots,
        "latency_s": {name: {str(b): s for b, s in seconds.items()} for name, seconds in given.items()},
        "profiles": {
            name: compare(LatencyProfile(seconds), chunks, slots, seed) for name, seconds in given.items()
        },
    }


def compare(
    profile: LatencyProfile, chunks: int, slots: int, seed: int, policies: Sequence[str] = POLICIES
) -> dict[str, Any]:
    """Return {p50,p95,p99}_chunk_latency_s and stall_rate by load and policy."""
    found: dict[str, Any] = {}
    slack_s = SLACK_CHUNKS * FORWARDS * profile(1)
    for load in LOADS:
        due_s = poisson(chunks, load * capacity(profile, FORWARDS, slots), seed)
        scene = BatchingScenario(due_s, FORWARDS, slack_s, slots)
        found[f"{load:g}"] = {
            name: figures(simulate(scene, GATHER_POLICIES.make(name), profile), slack_s) for name in policies
        }
    return found


def figures(latencies_s: list[float], slack_s: float) -> dict[str, float | None]:
    """Return percentiles of the latencies, and the share that exceeds the slack."""
    return {
        "p50_chunk_latency_s": percentile(latencies_s, 0.5),
        "p95_chunk_latency_s": percentile(latencies_s, 0.95),
        "p99_chunk_latency_s": percentile(latencies_s, 0.99),
        "stall_rate": sum(latency > slack_s for latency in latencies_s) / len(latencies_s),
    }


def table(result: Mapping[str, Any]) -> Table:
    """Format p95 and stalls."""
    shown = Table("profile", "load", *(f"{name} p95, s (stalls)" for name in POLICIES), box=box.SIMPLE)
    for profile, loads in result["profiles"].items():
        for load, policies in loads.items():
            cells = (
                f"{policies[name]['p95_chunk_latency_s']:.3g} ({policies[name]['stall_rate']:.1%})"
                for name in POLICIES
            )
            shown.add_row(profile, load, *cells)
    return shown

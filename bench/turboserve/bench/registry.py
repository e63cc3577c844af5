"""Every benchmark by name.

A benchmark is a module with

- `run(...) -> dict[str, Any]` (or a coroutine function). Its parameters are the command's options, annotated
  for typer. Its docstring is the command's help. Its result is written as JSON under the same keys. `run`
  raises `report.BenchError` for errors that the user must correct, and leaves nothing running.
- `table(result) -> RenderableType` (optional). Formats the result for the terminal; the default is
  `report.table`.

Each module is imported only when its benchmark runs: some need torch, which takes seconds to import.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Bench:
    """One benchmark, as `turboserve bench` lists it."""

    name: str
    module: str
    summary: str

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


class UnknownBenchError(LookupError):
    """No benchmark has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no benchmark is called {name!r}; there are: {', '.join(sorted(BENCHES))}")


BENCHES: dict[str, Bench] = {
    bench.name: bench
    for bench in (
        Bench(
            "autoscale",
            "turboserve.bench.autoscale.command",
            "The autoscaler over traces on a virtual clock: cost and lateness against oracles and others.",
        ),
        Bench(
            "batching",
            "turboserve.bench.batching.command",
            "The gather policies on a virtual clock: chunk latency and stalls by load.",
        ),
        Bench(
            "chaos",
            "turboserve.bench.chaos.command",
            "Random kills, stops and restarts on a real stack while sessions play: invariants, recovery.",
        ),
        Bench(
            "edge",
            "turboserve.bench.edge.command",
            "HTTP servers under attack, and how fast they deliver chunks: the gateway's and others.",
        ),
        Bench(
            "elastic",
            "turboserve.bench.elastic.command",
            "Sessions on a pool that follows them: time to scale out, harm, cost beside a fixed pool.",
        ),
        Bench(
            "engine",
            "turboserve.bench.engine.command",
            "The engine on this machine: chunk latency, throughput, the ring against copies, memory.",
        ),
        Bench(
            "migration",
            "turboserve.bench.migration.command",
            "Migration of a playing session between two workers: stall, bytes, throughput, the same video.",
        ),
        Bench(
            "simulate",
            "turboserve.bench.simulate.command",
            "The services' own processes on virtual time, with faults or calm: the design's invariants.",
        ),
        Bench(
            "placement",
            "turboserve.bench.placement.command",
            "Where sessions go: time per decision by number of workers, distance from an exhaustive oracle.",
        ),
        Bench(
            "stream",
            "turboserve.bench.stream",
            "Several viewers of a running stack: first chunk, gaps between chunks, stalls, losses.",
        ),
        Bench(
            "toyworld",
            "turboserve.bench.toyworld.command",
            "How often the shipped model draws what its prompt says, before and after a switch.",
        ),
        Bench(
            "tracing",
            "turboserve.bench.tracing.command",
            "What the spans of a worker's chunks cost: blocks without, with unexported and exported spans.",
        ),
    )
}


def find(name: str) -> Bench:
    """Return the benchmark `name`. Raises UnknownBenchError."""
    try:
        return BENCHES[name]
    except KeyError:
        raise UnknownBenchError(name) from None

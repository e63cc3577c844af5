"""The engine on this machine: chunk latency, throughput, the ring against copies, memory."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import repeat
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turboserve.bench.report import percentile

if TYPE_CHECKING:
    from torch import Tensor

    from turboserve.worker.model.transformer import CausalWanTransformer

POLICIES = ("fcfs", "chunk", "step")
MEMORY_SESSIONS = 4
MEMORY_CHUNKS = 5
"""Enough to fill the window, wrap around and change prompts."""
OVERLAP_SESSIONS = 2
LONG_WINDOW: dict[str, Any] = {"frames_per_chunk": 1, "local_attn_size": 240}
"""The shipped model's sizes with costly copies: one frame per chunk, and a long window."""


def run(
    sessions: Annotated[str, typer.Option(help="Numbers of viewers, separated by commas.")] = "1,2,4,8",
    chunks: Annotated[int, typer.Option(min=1, help="Number of chunks per session, after 2 of warm-up.")] = 8,
    repeats: Annotated[int, typer.Option(min=3, help="Number of runs of each comparison.")] = 9,
) -> dict[str, Any]:
    """Measure the engine with the shipped model on this machine.

    Reports chunk latency, stalls and throughput by policy and number of viewers; the KV ring against
    copies; decoding concurrent with denoising; memory.
    """
    import torch

    from turboserve.bench.engine.measure import batches
    from turboserve.bench.engine.memory import peak_and_expected
    from turboserve.bench.engine.models import PROMPT, toyworld
    from turboserve.bench.engine.overlap import compare, one_core
    from turboserve.bench.engine.traffic import WatchedEngine

    try:
        loads = [int(load) for load in sessions.split(",")]
    except ValueError:
        loads = []
    if not loads or min(loads) < 1:
        raise typer.BadParameter(f"--sessions: {sessions!r} must be numbers from 1, separated by commas")
    models = toyworld()
    policies: dict[str, Any] = {name: {} for name in POLICIES}
    for name in POLICIES:
        for load in loads:
            watched = WatchedEngine(models, load, name, repeat(PROMPT))
            watched.run(2)
            found = watched.run(chunks)
            policies[name][str(load)] = {
                "chunk_latency_s": {
                    key: percentile(found.latencies_s, share)
                    for key, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
                },
                "stall_rate": found.stalls / len(found.latencies_s),
                "throughput_chunks_per_s": len(found.latencies_s) / found.elapsed_s,
                "busy": found.busy_s / found.elapsed_s,
            }
    with torch.inference_mode():
        text = models.text.encode([PROMPT])
    against = ring_vs_copy(models.transformer, text, repeats)
    by_batch = batches(models.transformer, text, (1, 2, 4), repeats)
    peak_bytes, expected_bytes, budget = peak_and_expected(models, MEMORY_SESSIONS, MEMORY_CHUNKS)
    all_cores = compare(models, OVERLAP_SESSIONS, chunks, repeats)
    with one_core():
        one_core_result = compare(models, OVERLAP_SESSIONS, chunks, repeats)
    return {
        "clock": "Processor seconds. While nothing is due, the clock advances to the next due time. "
        "overlap: elapsed seconds.",
        "policies": policies,
        "chunk_s": {str(size): found.chunk_s for size, found in by_batch.items()},
        "forward_s": {str(size): found.forward_s for size, found in by_batch.items()},
        "naive_chunk_s": against["shipped"]["shift"]["copies_s"],
        "ring_vs_copy_speedup": against["shipped"]["shift"]["speedup"],
        "ring_vs_copy": against,
        "overlap_speedup": all_cores.speedup,
        "overlap_speedup_one_core": one_core_result.speedup,
        "overlap": {"all_cores": asdict(all_cores), "one_core": asdict(one_core_result)},
        "peak_bytes": peak_bytes,
        "expected_bytes": expected_bytes,
        "memory_sessions": MEMORY_SESSIONS,
        "budget": {part: size for part, size in asdict(budget).items() if part != "total_bytes"},
    }


def ring_vs_copy(
    shipped: CausalWanTransformer, text: Tensor, rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Compare the ring with caches that shift (Self-Forcing) and clone (LongLive 1), by model."""
    import torch

    from turboserve.bench.engine.measure import ring_against_copies
    from turboserve.bench.engine.models import random_transformer
    from turboserve.bench.engine.naive import ClonedCache, ShiftedCache

    config = replace(shipped.config, **LONG_WINDOW)
    models = {
        "shipped": shipped,
        "long_window": random_transformer(config, torch.device("cpu"), torch.float32),
    }
    caches = {"shift": ShiftedCache, "clone": ClonedCache}
    return {
        model: {
            name: asdict(ring_against_copies(transformer, text, rounds, cache))
            for name, cache in caches.items()
        }
        for model, transformer in models.items()
    }

"""Cost of the spans of a worker's chunks: blocks without spans, with unexported and with exported spans."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from turboserve.bench.tracing.measure import TracedWorker

MODES = ("off", "unsampled", "sampled")


def run(
    sessions: Annotated[int, typer.Option(min=1, help="Number of sessions of the worker.")] = 4,
    chunks: Annotated[int, typer.Option(min=1, help="Number of chunks per session in a block.")] = 2,
    blocks: Annotated[int, typer.Option(min=3, help="Number of blocks per mode. The modes take turns.")] = 20,
) -> dict[str, Any]:
    """Measure what the spans of chunks cost a worker with the shipped model.

    Blocks of chunks are generated and packaged in turns: without tracing, with spans that are recorded and
    not exported (the default for a chunk that follows no request), and with all spans exported. Seconds are
    those of the processor, over all threads. `span_s` is measured by itself: the spans of one chunk, sent
    to a receiver in another process as often as a worker sends them. `share` is `span_s` in a chunk's time
    without spans. `paired_share` compares pairs of neighboring blocks.
    """
    from turboserve.bench.tracing import receiver
    from turboserve.bench.tracing.measure import TracedWorker, begin_tracing

    with receiver.running() as endpoint:
        begin_tracing(endpoint)
        return _measured(TracedWorker(sessions), chunks, blocks)


def _measured(worker: TracedWorker, chunks: int, blocks: int) -> dict[str, Any]:
    worker.block("off", 1)
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(blocks):
        turn = number % len(MODES)
        for mode in (*MODES[turn:], *MODES[:turn]):
            found[mode].append(worker.block(mode, chunks))
    off = statistics.median(found["off"])
    spans = {mode: worker.span_seconds(mode) for mode in MODES}
    return {
        "clock": "Processor seconds of all threads; medians of the blocks.",
        "chunk_s": {mode: statistics.median(values) for mode, values in found.items()},
        "paired_share": {
            mode: statistics.median(
                (traced - plain) / plain for traced, plain in zip(found[mode], found["off"], strict=True)
            )
            for mode in MODES[1:]
        },
        "span_s": spans,
        "share": {mode: spans[mode] / off for mode in MODES[1:]},
        "spans_per_chunk": worker.spans_per_chunk,
    }

"""Cost of the spans of a worker's chunks: blocks without spans, with unexported and with exported spans."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from turboserve.bench.tracing.measure import TracedWorker

MODES = ("off", "control", "unsampled", "sampled")
"""`control` is `off` once more. The difference of the two shows how exact the comparison is."""
WARM_UP_CHUNKS = 3


def run(
    sessions: Annotated[int, typer.Option(min=1, help="Number of sessions of the worker.")] = 4,
    chunks: Annotated[int, typer.Option(min=1, help="Number of chunks per session in a block.")] = 1,
    blocks: Annotated[
        int, typer.Option(min=8, help="Number of blocks per mode. The modes take turns.")
    ] = 200,
) -> dict[str, Any]:
    """Measure what the spans of chunks cost a worker with the shipped model.

    Blocks of chunks are generated and packaged in turns: without tracing, once more without (`control`),
    with spans that are recorded and not exported (the default for a chunk that follows no request), and with
    all spans exported. Seconds are those of the processor, over all threads.

    - `paired_share`: median over the rounds of a block's time relative to the block without tracing of the
      same round, less 1, with its 95 % interval in `paired_share_95`. The time to send the spans
      (`export_s`, of one chunk) is measured between blocks and added.
    - `span_s`: the spans of one chunk by themselves, many times in a row, sent to a receiver in another
      process as often as a worker sends them. `share` is `span_s` in a chunk's time without spans.
    """
    from turboserve.bench.tracing import receiver
    from turboserve.bench.tracing.measure import TracedWorker, begin_tracing

    with receiver.running() as endpoint:
        begin_tracing(endpoint)
        return _measured(TracedWorker(sessions), chunks, blocks)


def _measured(worker: TracedWorker, chunks: int, blocks: int) -> dict[str, Any]:
    for mode in MODES:
        worker.block(mode, WARM_UP_CHUNKS)
    worker.export()
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    export_s = []
    for number in range(blocks):
        turn = number % len(MODES)
        order = (*MODES[turn:], *MODES[:turn])
        # Each mode runs before and after each other one equally often, so that a trend cancels out.
        for mode in order if number // len(MODES) % 2 else reversed(order):
            found[mode].append(worker.block(mode, chunks))
        if (seconds := worker.export()) is not None:
            export_s.append(seconds)
    off = statistics.median(found["off"])
    spans = {mode: worker.span_seconds(mode) for mode in MODES}
    sent_share = statistics.mean(export_s) / off if export_s else 0.0
    pairs = {
        mode: sorted(
            traced / plain - 1 + sent_share * (mode == "sampled")
            for traced, plain in zip(found[mode], found["off"], strict=True)
        )
        for mode in MODES[1:]
    }
    return {
        "clock": "Processor seconds of all threads; medians of the blocks.",
        "chunk_s": {mode: statistics.median(values) for mode, values in found.items()},
        "paired_share": {mode: statistics.median(shares) for mode, shares in pairs.items()},
        "paired_share_95": {mode: median_interval(shares) for mode, shares in pairs.items()},
        "export_s": statistics.mean(export_s) if export_s else None,
        "span_s": spans,
        "share": {mode: spans[mode] / off for mode in MODES[1:]},
        "spans_per_chunk": worker.spans_per_chunk,
    }


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median of at least eight sorted values, of any distribution.

    The number of values below the true median is binomial with p = ½; see e.g. Conover, Practical
    Nonparametric Statistics, 3.2. Uses the normal approximation.
    """
    half = 1.96 * math.sqrt(len(values)) / 2
    low = max(1, math.floor(len(values) / 2 - half))
    return values[low - 1], values[-low]

"""Cost of the spans of a worker's chunks: blocks without spans, with unexported and with exported spans."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from turboserve.bench.tracing.measure import BlockTime, TracedWorker

MODES = ("off", "control", "unsampled", "sampled")
"""`control` is `off` once more. The difference of the two shows how exact the comparison is."""
WARM_UP_CHUNKS = 3
RESAMPLES = 2_000


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

    - `overhead_share`: what tracing adds to the worker's own code, in the whole time of a chunk without
      tracing. It is the mean over the rounds of a block's `host_s` less that of the block without tracing of
      the same round, with its 95 % interval in `overhead_share_95`. `host_s` is the time of the engine's
      thread without the calls of the model, the decoder and the video's encoder, which contain no code of
      tracing and whose time varies by more than tracing takes.
    - `paired_share`: the same of the whole time of a chunk: median over the rounds of a block's time relative
      to the block without tracing of the same round, less 1, with its 95 % interval in `paired_share_95`.
    - In both, the time to send the spans (`export_s`, of one chunk) is measured between blocks and added.
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
    # As services do when they have started.
    gc.collect()
    gc.freeze()
    found: dict[str, list[BlockTime]] = {mode: [] for mode in MODES}
    export_s = []
    for number in range(blocks):
        turn = number % len(MODES)
        order = (*MODES[turn:], *MODES[:turn])
        # Each mode runs before and after each other one equally often, so that a trend cancels out.
        for mode in order if number // len(MODES) % 2 else reversed(order):
            found[mode].append(worker.block(mode, chunks))
        if (seconds := worker.export()) is not None:
            export_s.append(seconds)
    chunk_s = {mode: [block.chunk_s for block in blocks] for mode, blocks in found.items()}
    off = statistics.median(chunk_s["off"])
    spans = {mode: worker.span_seconds(mode) for mode in MODES}
    sent_share = statistics.mean(export_s) / off if export_s else 0.0
    pairs = {
        mode: sorted(
            traced / plain - 1 + sent_share * (mode == "sampled")
            for traced, plain in zip(chunk_s[mode], chunk_s["off"], strict=True)
        )
        for mode in MODES[1:]
    }
    added = {
        mode: [
            (traced.host_s - plain.host_s) / off
            for traced, plain in zip(found[mode], found["off"], strict=True)
        ]
        for mode in MODES[1:]
    }
    sent = {"sampled": [seconds / off for seconds in export_s]}
    return {
        "clock": "Processor seconds of all threads; medians of the blocks.",
        "chunk_s": {mode: statistics.median(values) for mode, values in chunk_s.items()},
        "host_s": {mode: statistics.mean(each.host_s for each in values) for mode, values in found.items()},
        "overhead_share": {mode: _sum_of_means(added[mode], sent.get(mode, ())) for mode in added},
        "overhead_share_95": {mode: mean_interval(added[mode], sent.get(mode, ())) for mode in added},
        "paired_share": {mode: statistics.median(shares) for mode, shares in pairs.items()},
        "paired_share_95": {mode: median_interval(shares) for mode, shares in pairs.items()},
        "export_s": statistics.mean(export_s) if export_s else None,
        "span_s": spans,
        "share": {mode: spans[mode] / off for mode in MODES[1:]},
        "spans_per_chunk": worker.spans_per_chunk,
    }


def _sum_of_means(*samples: Sequence[float]) -> float:
    return sum(statistics.mean(sample) for sample in samples if sample)


def mean_interval(*samples: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the sum of the samples' means, by the bootstrap.

    Each of `RESAMPLES` times, every sample is drawn anew from its own values. The interval has the central
    95 % of the sums. See e.g. Efron and Tibshirani, An Introduction to the Bootstrap, 13.3.
    """
    chance = Random(1)
    sums = sorted(
        _sum_of_means(*(chance.choices(sample, k=len(sample)) if sample else () for sample in samples))
        for _ in range(RESAMPLES)
    )
    return sums[round(0.025 * RESAMPLES)], sums[round(0.975 * RESAMPLES) - 1]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median of at least eight sorted values, of any distribution.

    The number of values below the true median is binomial with p = ½; see e.g. Conover, Practical
    Nonparametric Statistics, 3.2. Uses the normal approximation.
    """
    half = 1.96 * math.sqrt(len(values)) / 2
    low = max(1, math.floor(len(values) / 2 - half))
    return values[low - 1], values[-low]

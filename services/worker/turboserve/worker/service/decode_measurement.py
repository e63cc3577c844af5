"""How long a worker's decoder takes for chunks: measured at its start, and again while it is idle.

All times of one device are by one clock. On a CPU they are processor seconds, as a home's L(b): workers start
together, and a time measured while all others warm up does not hold later (`warm_up.measure`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from turboserve.worker.engine.decode_jobs import CachedDecoder, CacheTable, DecodeJob, digest_of_latents
from turboserve.worker.engine.interface import Decoder
from turboserve.worker.model.config import ModelConfig

WARM_UP_CHUNKS = 2
MEASURED_CHUNKS = 3
"""Further chunks of which the fastest is a decode worker's time of a chunk: noise only adds time."""


def clock_of(device: torch.device) -> Callable[[], float]:
    """The clock of all times of a chunk on this device."""
    return time.process_time if device.type == "cpu" else time.monotonic


def warm_up(
    decoder: Decoder,
    config: ModelConfig,
    device: torch.device,
    chunks: int = WARM_UP_CHUNKS,
    rows: int = 1,
    clock: Callable[[], float] | None = None,
) -> list[float]:
    """Decode the first chunks of a video, or of some at once. Returns the time of each decode, in seconds.

    A device's first decode takes longer than a home waits. `rows`: sessions of one decode.
    `clock`: that of the times. None: `clock_of(device)`.
    """
    clock = clock or clock_of(device)
    cached, latents = CachedDecoder(decoder, device, CacheTable(rows)), torch.zeros(config.latent_shape)
    base: str | None = None
    seconds: list[float] = []
    for index in range(chunks):
        digest = digest_of_latents(index, latents)
        jobs = [DecodeJob(f"warm-up-{row}", index, latents, base, digest, ()) for row in range(rows)]
        began = clock()
        _decode(cached, jobs)
        # A clock may not have moved.
        seconds.append(max(clock() - began, 1e-6))
        base = digest
    return seconds


def _decode(cached: CachedDecoder, jobs: Sequence[DecodeJob]) -> None:
    if len(jobs) == 1 or jobs[0].base is None:
        for job in jobs:
            cached.decode(job)
    else:
        cached.decode_together(jobs)


def seconds_by_rows(
    decoder: Decoder, config: ModelConfig, device: torch.device, rows: int
) -> dict[int, float]:
    """Measure the time of a decode by its number of sessions, in powers of two up to `rows`."""
    found: dict[int, float] = {}
    count = 1
    while count <= rows:
        seconds = warm_up(decoder, config, device, WARM_UP_CHUNKS + MEASURED_CHUNKS, count)
        found[count] = min(seconds[WARM_UP_CHUNKS:])
        count *= 2
    return found


def measured_again(
    decoder: Decoder, config: ModelConfig, device: torch.device, clock: Callable[[], float] | None = None
) -> float:
    """Return the time of a chunk now, by `clock` as in `warm_up`.

    The first chunk of a video has fewer frames. So it is that of the second one. Their cache is not kept: a
    worker has memory for no further one while it rebuilds a session's.
    """
    return warm_up(decoder, config, device, 2, clock=clock)[1]

"""The shipped model, for benchmarks."""

from __future__ import annotations

import torch

from turboserve.bench.engine.measure import batches
from turboserve.worker.engine.engine import Models
from turboserve.worker.model.toyworld import load_toyworld

PROMPT = "a red circle moving left on black"
SIZES = (1, 2, 4, 8, 16)


def toyworld() -> Models:
    """The shipped model on one thread of the CPU, as a worker runs it."""
    torch.set_num_threads(1)
    return load_toyworld()


def toyworld_forward_profile(repeats: int = 7) -> dict[int, float]:
    """Seconds of processor time of a forward by batch size, made to rise, as a profile must."""
    models = toyworld()
    with torch.inference_mode():
        text = models.text.encode([PROMPT])
    seconds: dict[int, float] = {}
    for size, found in batches(models.transformer, text, SIZES, repeats).items():
        seconds[size] = max([found.forward_s, *seconds.values()])
    return seconds

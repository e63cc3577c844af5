"""How the results of a model's checks are compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turboserve.worker.engine.interface import ChunkReady


def same_chunks(ours: Sequence[ChunkReady], theirs: Sequence[ChunkReady]) -> bool:
    """Whether two sessions have the same chunks, bit for bit."""
    return len(ours) == len(theirs) and all(
        torch.equal(a.latents, b.latents) and torch.equal(a.frames, b.frames)
        for a, b in zip(ours, theirs, strict=True)
    )


def largest_level(ours: Tensor, theirs: Tensor) -> int:
    """Largest difference of a pixel, of 255."""
    return int((ours.int() - theirs.int()).abs().max())


def largest(values: Tensor) -> float:
    """Largest absolute value; 0 if there is none."""
    return float(values.abs().max()) if values.numel() else 0.0

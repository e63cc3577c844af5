"""A chunk's time at every configuration of fidelity, for the frontier of a model on a device."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from turboserve.bench.engine.measure import Sessions, Timer
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.model.transformer import CausalWanTransformer

SPARSITIES = (0.0, 0.5, 0.8)


def configurations(
    model: CausalWanTransformer, text: torch.Tensor, size: int, repeats: int
) -> dict[str, Any]:
    """Measure a chunk of `size` sessions: steps, then window, then sparsity lowered from the best.

    Returns the configuration's label → seconds of the chunk, and its share of the best one's.
    """
    best = Fidelity.best(model.config)
    windows = sorted({best.window_chunks, max(1, best.window_chunks // 2), 1}, reverse=True)
    timer, sessions = Timer(model.patch_embedding.weight.device), Sessions(model, size, text)
    sessions.fill()
    found: dict[str, Any] = {}
    best_s = 0.0
    for steps, window, sparsity in itertools.product(range(best.steps, 0, -1), windows, SPARSITIES):
        # A window of one chunk leaves too few keys for a choice among blocks to be of interest.
        if sparsity and window == 1:
            continue
        for state in sessions.states:
            state.fidelity = Fidelity(steps, window, sparsity)
        seconds = timer.median(sessions.chunk, repeats)
        best_s = best_s or seconds
        found[Fidelity(steps, window, sparsity).label] = {"chunk_s": seconds, "of_best": seconds / best_s}
    return found

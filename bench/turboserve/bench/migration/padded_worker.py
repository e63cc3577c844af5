"""A worker with sessions of any size: toyworld, with additional bytes in its state that never change.

They stand for a large model's KV window, of which a chunk rewrites a small part only.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from turboserve import service
from turboserve.worker.engine.interface import Decoder
from turboserve.worker.engine.models import Models
from turboserve.worker.service.app import start
from turboserve.worker.service.models import load_models
from turboserve.worker.settings import Settings

PAD_VARIABLE = "TURBOSERVE_BENCH_PAD_BYTES"
PADDING = "padding"


class PaddedDecoder:
    """Keeps `pad_bytes` more of each session than the decoder it wraps."""

    def __init__(self, inner: Decoder, pad_bytes: int) -> None:
        self._inner, self._pad_bytes = inner, pad_bytes
        self.cache_bytes = inner.cache_bytes + pad_bytes
        self.weight_bytes, self.workspace_bytes = inner.weight_bytes, inner.workspace_bytes

    def decode(
        self, latents: Tensor, caches: Sequence[dict[str, Tensor]] | None
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """See `Decoder.decode`."""
        kept = None if caches is None else [dict(cache) for cache in caches]
        padding = [cache.pop(PADDING) for cache in kept or ()]
        if kept is None:
            padding = [torch.arange(self._pad_bytes // 8, dtype=torch.int64) for _ in latents]
        frames, after = self._inner.decode(latents, kept)
        return frames, [{**cache, PADDING: pad} for cache, pad in zip(after, padding, strict=True)]


def padded_models(settings: Settings) -> Models:
    """Load the configured model, with padding if the environment requests it."""
    models = load_models(settings)
    pad_bytes = int(os.environ.get(PAD_VARIABLE, "0"))
    if not pad_bytes:
        return models
    return replace(models, decoder=PaddedDecoder(models.decoder, pad_bytes))


if __name__ == "__main__":
    service.run("worker", Settings(), functools.partial(start, load=padded_models))

"""A whole video of a model without a window, chunk by chunk: servers publish its mean time of a chunk."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from turboserve.bench.engine.measure import Sessions, Timer
from turboserve.bench.engine.models import DecoderSizes, random_decoder, random_transformer
from turboserve.bench.engine.stages import decoding
from turboserve.worker.engine.errors import AttentionUnavailableError
from turboserve.worker.model.config import ModelConfig

Way = tuple[str, str | None]
"""Kind of attention and compiler."""


def video(
    config: ModelConfig, sizes: DecoderSizes, device: torch.device, dtype: torch.dtype, ways: dict[str, Way]
) -> dict[str, Any]:
    """Measure each chunk of one session's video in each way, and the decoding of a chunk.

    Seconds are medians of three videos, after one that is not counted. The window grows with the video.
    """
    model, timer = random_transformer(config, device, dtype), Timer(device)
    text = torch.randn(1, config.text_len, config.text_dim, device=device, dtype=dtype)
    decoder = random_decoder(sizes, config, device, dtype)
    found: dict[str, Any] = {
        "decode_s": decoding(decoder, torch.zeros(config.latent_shape, device=device), [1], timer, 3)
    }
    chunks = config.max_frames // config.frames_per_chunk
    for name, (attention, compiler) in ways.items():
        try:
            sessions = Sessions(model, 1, text, attention=attention, compiler=compiler)
        except AttentionUnavailableError as error:
            found[name] = {"unavailable": str(error)}
            continue
        videos = [[timer.once(sessions.chunk) for _ in range(chunks)] for _ in range(4)][1:]
        by_chunk = [statistics.median(seconds) for seconds in zip(*videos, strict=True)]
        found[name] = {"mean_s": statistics.fmean(by_chunk), "chunk_s": by_chunk}
    return found

"""Bytes of sequence parallelism: what two workers exchange, and what a donor keeps."""

from __future__ import annotations

import torch

from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.sequence_parallel import DONOR, HOME, Split, part_size
from turboserve.worker.model.config import ModelConfig


def exchanged_bytes(config: ModelConfig, frames: int, item_bytes: int) -> int:
    """Bytes that the home and the donor together send around the attentions of one forward."""
    split = Split.of(config)
    home, donor = (part_size(split.tokens_of(rank)) * frames for rank in (HOME, DONOR))
    home_heads, donor_heads = (part_size(split.heads_of(rank)) for rank in (HOME, DONOR))
    before = home * 3 * donor_heads + donor * (home_heads + 2 * config.num_heads)
    after = donor * home_heads + home * donor_heads
    return config.num_layers * (before + after) * config.head_dim * item_bytes


def lent_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a donor's memory for one borrowed session (`LentMemory`)."""
    layout, heads = SlabLayout.of(config, dtype), part_size(Split.of(config).heads_of(DONOR))
    return (layout.self_bytes + layout.sink_bytes) // config.num_heads * heads + layout.text_bytes

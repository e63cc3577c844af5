"""One session's keys and values: their sizes, and the tensors that hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turboserve.worker.model.config import ModelConfig


@dataclass(frozen=True)
class SlabLayout:
    """Sizes of a slab. One frame slot per latent frame of the window, for all layers."""

    layers: int
    frames: int
    tokens_per_frame: int
    heads: int
    head_dim: int
    text_len: int
    kept_sink_frames: int
    """Number of sink frames whose keys are also kept as written, for window rotation."""
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype) -> SlabLayout:
        """The layout for a model's sessions."""
        windowed = config.local_attn_size != -1
        return cls(
            layers=config.num_layers,
            frames=config.window_frames,
            tokens_per_frame=config.tokens_per_frame,
            heads=config.num_heads,
            head_dim=config.head_dim,
            text_len=config.text_len,
            kept_sink_frames=config.sink_size if windowed and config.rotation == "window" else 0,
            dtype=dtype,
        )

    @property
    def self_bytes(self) -> int:
        """Bytes of the self-attention keys and values of all frame slots."""
        return 2 * self.frames * self._frame_bytes

    @property
    def text_bytes(self) -> int:
        """Bytes of the cross-attention keys and values of one prompt."""
        return 2 * self.layers * self.text_len * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def sink_bytes(self) -> int:
        """Bytes of the sink's keys as written; zero for absolute rotation."""
        return self.kept_sink_frames * self._frame_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of one slab."""
        return self.self_bytes + self.text_bytes + self.sink_bytes

    @property
    def _frame_bytes(self) -> int:
        return self.layers * self.tokens_per_frame * self.heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Slab:
    """Views of one slot of the pool. `index` is the slot."""

    index: int
    keys: Tensor
    """[layers, frames, tokens, heads, head_dim]"""
    values: Tensor
    """[layers, frames, tokens, heads, head_dim]"""
    text_keys: Tensor
    """[layers, text_len, heads, head_dim]"""
    text_values: Tensor
    """[layers, text_len, heads, head_dim]"""
    sink_keys: Tensor
    """[layers, kept_sink_frames, tokens, heads, head_dim], as written"""

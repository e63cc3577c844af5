"""How a worker's memory is shared out at start: models, workspace, and as many sessions as then fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turboserve.worker.engine.engine import LANE_DEPTH, TEXT_BATCH, Models
from turboserve.worker.engine.errors import BudgetTooSmallError
from turboserve.worker.engine.moving import SOURCES_AT_ONCE
from turboserve.worker.engine.rows import ROTATIONS
from turboserve.worker.engine.session import MAX_UNDECODED
from turboserve.worker.engine.slab import SlabLayout
from turboserve.worker.model.config import ModelConfig

DECODE_SHARE = 0.05


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes on one device."""

    total_bytes: int
    model_bytes: int
    """Weights of all networks: transformer, text encoder, decoder."""
    workspace_bytes: int
    """What computing takes for a moment, however many sessions there are."""
    slab_bytes: int
    """Of each session: keys and values."""
    decode_cache_bytes: int
    """Of each session."""
    state_bytes: int = 0
    """Of each session: latents, prompt embeddings and what else it holds outside its slab."""
    row_bytes: int = 0
    """What its row of a forward takes for a moment."""

    @property
    def session_bytes(self) -> int:
        """What one more session takes."""
        return self.slab_bytes + self.decode_cache_bytes + self.state_bytes + self.row_bytes

    def expected_bytes(self, sessions: int) -> int:
        """All of it, with so many sessions."""
        return self.model_bytes + self.workspace_bytes + sessions * self.session_bytes

    def sessions(self) -> int:
        """Sessions that fit. Raises `BudgetTooSmallError` when none does."""
        count = (self.total_bytes - self.expected_bytes(0)) // self.session_bytes
        if count < 1:
            raise BudgetTooSmallError(self.expected_bytes(1), self.total_bytes)
        return count


def plan(models: Models, total_bytes: int, decode_batch: int = 1) -> MemoryBudget:
    """The budget of an engine whose forwards have as many rows as there are sessions, and which decodes
    `decode_batch` of them at once."""
    config = models.transformer.config
    dtype = models.transformer.patch_embedding.weight.dtype
    layout = SlabLayout.of(config, dtype)
    decoder, text = models.decoder, models.text
    row = forward_bytes(config, dtype, config.frames_per_chunk)
    # A recache is a batch of its own, of so few rows that it has no more tokens than a batch of chunks; one
    # row is the least.
    recache = max(0, forward_bytes(config, dtype, config.window_frames) - row)
    projected = 2 * layout.text_bytes
    decoding = decode_batch * decode_bytes(models)
    return MemoryBudget(
        total_bytes=total_bytes,
        model_bytes=models.weight_bytes,
        workspace_bytes=recache
        + projected
        + TEXT_BATCH * text.workspace_bytes
        + decoding
        + SOURCES_AT_ONCE * decoder.cache_bytes
        + ROTATIONS * rotation_bytes(config, config.frames_per_chunk)
        + config.chunk_forwards * modulation_bytes(config, dtype),
        slab_bytes=layout.total_bytes,
        decode_cache_bytes=decoder.cache_bytes,
        state_bytes=state_bytes(config, dtype),
        row_bytes=row,
    )


def decode_bytes(models: Models) -> int:
    """What one row of a decode takes at most: its workspace, and new caches beside the old ones until the
    engine takes them up."""
    return models.decoder.workspace_bytes + LANE_DEPTH * models.decoder.cache_bytes


def affordable_decodes(models: Models, total_bytes: int, limit: int) -> int:
    """Sessions that may be decoded at once, 1 to `limit`, with more than one in `DECODE_SHARE` of memory.

    What a batch gains is not known before it was tried, and its memory is kept whether or not it is used.
    """
    more = int(DECODE_SHARE * total_bytes) // max(1, decode_bytes(models))
    return max(1, min(limit, 1 + more))


def forward_bytes(config: ModelConfig, dtype: torch.dtype, frames: int) -> int:
    """What one row of `frames` latent frames takes at most during a forward, beside weights and slab.

    The larger of two moments of a block: rotating queries and keys, in float32 and complex numbers of it, or
    the feed-forward's two wide tensors. A test holds it against the tensors of real forwards.
    """
    size, tokens = dtype.itemsize, frames * config.tokens_per_frame
    attention = config.dim * (10 * size + 16)
    feed_forward = size * (6 * config.dim + 2 * config.ffn_dim)
    latents = 8 * config.latent_shape[1] * config.latent_height * config.latent_width * frames
    own = tokens * max(attention, feed_forward) + 3 * latents
    return own + rotation_bytes(config, frames) + modulation_bytes(config, dtype)


def rotation_bytes(config: ModelConfig, frames: int) -> int:
    """Rotations of a row's tokens: complex64, half as many as a head has channels."""
    return frames * config.tokens_per_frame * (config.head_dim // 2) * torch.complex64.itemsize


def modulation_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Modulations of all blocks and the head for one timestep, while they are made and after."""
    return 2 * (6 * config.num_layers + 2) * config.dim * dtype.itemsize


def state_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What a session holds on the device beside slab and decoder cache.

    Latents of its window in the slab's type; in float32 those that wait for the decoder, and a chunk's own:
    noise, noisy, clean and the flow. Embeddings of the prompt it has and of one that waits, in float32.
    """
    latents = torch.Size(config.latent_shape).numel()
    chunks = -(-config.window_frames // config.frames_per_chunk)
    kept = chunks * latents * dtype.itemsize
    working = (MAX_UNDECODED + 5) * latents * torch.float32.itemsize
    text = 2 * config.text_len * config.text_dim * torch.float32.itemsize
    return kept + working + text

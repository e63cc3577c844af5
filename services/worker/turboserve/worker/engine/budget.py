"""The memory budget of a worker at start: models, workspace, and as many sessions as then fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turboserve.worker.engine.errors import BudgetTooSmallError
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.models import Models
from turboserve.worker.engine.pipeline import DECODE_EXECUTOR_DEPTH, TEXT_BATCH
from turboserve.worker.engine.session import MAX_UNDECODED
from turboserve.worker.engine.state_pages import SOURCES_AT_ONCE
from turboserve.worker.engine.work import ROTATIONS
from turboserve.worker.model.config import ModelConfig

DECODE_SHARE = 0.05


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes on one device."""

    total_bytes: int
    model_bytes: int
    """Weights of all networks: transformer, text encoder, decoder."""
    workspace_bytes: int
    """Temporary memory of computing that does not depend on the number of sessions."""
    slab_bytes: int
    """Keys and values of one session."""
    decode_cache_bytes: int
    """Decoder cache of one session."""
    state_bytes: int = 0
    """Other memory of one session outside its slab: latents and prompt embeddings."""
    row_bytes: int = 0
    """Temporary memory of one session's row of a forward."""

    @property
    def session_bytes(self) -> int:
        """Memory of one more session."""
        return self.slab_bytes + self.decode_cache_bytes + self.state_bytes + self.row_bytes

    def expected_bytes(self, sessions: int) -> int:
        """Memory of everything with `sessions` sessions."""
        return self.model_bytes + self.workspace_bytes + sessions * self.session_bytes

    def sessions(self) -> int:
        """Number of sessions that fit. Raises `BudgetTooSmallError` if none fits."""
        count = (self.total_bytes - self.expected_bytes(0)) // self.session_bytes
        if count < 1:
            raise BudgetTooSmallError(self.expected_bytes(1), self.total_bytes)
        return count


def plan(
    models: Models, total_bytes: int, decode_batch: int = 1, *, decode_apart: bool = False
) -> MemoryBudget:
    """The budget of an engine with one row per session in a forward and `decode_batch` sessions in a decode.

    `decode_apart`: see `EngineOptions.decode_apart`. The caches of `decoding_apart.OWN_CACHES` sessions then
    take the place of those that are sent.
    """
    config = models.transformer.config
    dtype = models.transformer.patch_embedding.weight.dtype
    layout = SlabLayout.of(config, dtype)
    cache_bytes, text = models.cache_bytes, models.text
    row = forward_bytes(config, dtype, config.frames_per_chunk)
    # A recache is a separate batch, of so few rows that it has no more tokens than a batch of chunks, but at
    # least one row.
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
        + SOURCES_AT_ONCE * cache_bytes
        + ROTATIONS * rotation_bytes(config, config.frames_per_chunk)
        + config.chunk_forwards * modulation_bytes(config, dtype),
        slab_bytes=layout.total_bytes,
        decode_cache_bytes=0 if decode_apart else cache_bytes,
        state_bytes=state_bytes(config, dtype),
        row_bytes=row,
    )


def decode_bytes(models: Models) -> int:
    """Largest memory of one row of a decode: its workspace, and new caches that the engine does not use
    yet."""
    workspace_bytes = max(each.workspace_bytes for each in models.decoders)
    return workspace_bytes + DECODE_EXECUTOR_DEPTH * models.cache_bytes


def affordable_decodes(models: Models, total_bytes: int, limit: int) -> int:
    """Number of sessions decoded at once, 1 to `limit`. All but the first fit in `DECODE_SHARE` of memory.

    The gain of a batch is not known before it is measured, and its memory is reserved whether it is used or
    not.
    """
    more = int(DECODE_SHARE * total_bytes) // max(1, decode_bytes(models))
    return max(1, min(limit, 1 + more))


def forward_bytes(config: ModelConfig, dtype: torch.dtype, frames: int) -> int:
    """Largest memory of one row of `frames` latent frames during a forward, beside weights and slab.

    This is the larger of two moments of a block: the rotation of queries and keys, in float32 and complex64,
    or the two wide tensors of the feed-forward. A test checks it against the tensors of real forwards.
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
    """Modulations of all blocks and the head for one timestep, while they are computed and after."""
    return 2 * (6 * config.num_layers + 2) * config.dim * dtype.itemsize


def state_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Memory of a session on the device beside slab and decoder cache, bytes.

    - latents of its window, in the slab's type
    - float32 latents that wait for the decoder, and those of the current chunk: noise, noisy, clean and flow
    - float32 embeddings of the current prompt and of a waiting one
    """
    latents = torch.Size(config.latent_shape).numel()
    chunks = -(-config.window_frames // config.frames_per_chunk)
    kept = chunks * latents * dtype.itemsize
    working = (MAX_UNDECODED + 5) * latents * torch.float32.itemsize
    text = 2 * config.text_len * config.text_dim * torch.float32.itemsize
    return kept + working + text

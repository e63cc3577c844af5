"""The causal Wan transformer (Wan 2.1 T2V as Self-Forcing and LongLive run it), apart from its memory.

Parameter names are those of the public checkpoints. An `AttentionMemory` determines what a token may attend
to: training implements it with a mask, and the engine with its KV ring.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turboserve.worker.model.block import AttentionMemory, Block, compiled_parts
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.rope import Rotation


class Conditioning(NamedTuple):
    """Modulations of a model for given timesteps; 1 is already added to every scale.

    Batch and frames may be 1 where all rows or frames have one timestep.
    """

    blocks: Tensor
    """[layers, 6, B, F, 1, dim]"""
    head: Tensor
    """[2, B, F, 1, dim]"""


class Head(nn.Module):
    """Final norm, modulation and projection to one patch's channels."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = (config.dim,)
        self.eps = config.eps
        self.head = nn.Linear(config.dim, math.prod(config.patch_size) * config.out_dim)
        self.modulation = nn.Parameter(torch.randn(1, 2, config.dim) / config.dim**0.5)

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        """x [B, F, T, dim], modulation [2, B, F, 1, dim], 1 added to the scale → patch channels [B, F, T,
        ·]."""
        shift, scale = modulation.unbind(0)
        x = torch.addcmul(shift, F.layer_norm(x, self.width, eps=self.eps), scale)
        return F.linear(x, self.head.weight, self.head.bias)


class CausalWanTransformer(nn.Module):
    """Predicts the flow (noise − x0) of latent frames, each at its own timestep and frame index."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.patch_embedding = nn.Conv3d(config.in_dim, dim, config.patch_size, config.patch_size)
        if config.learned_positions:
            self.position_embedding = nn.Parameter(torch.zeros(config.tokens_per_frame, dim))
        self.text_embedding = nn.Sequential(
            nn.Linear(config.text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(nn.Linear(config.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config)
        self.rotation = Rotation(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set initial weights for training, as Wan's: Xavier for linear layers, the head at zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.patch_embedding.weight.flatten(1))
        for embedding in (self.text_embedding, self.time_embedding):
            for module in embedding:
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(self.head.head.weight)

    def forward(
        self, latents: Tensor, timesteps: Tensor, frame_index: Tensor, memory: AttentionMemory
    ) -> Tensor:
        """Run one forward over rows that may differ in everything except their number of frames.

        latents [B, F, C, H, W]; timesteps [B, F] float in 0..1000; frame_index [B, F] long, absolute in the
        row's session. Returns the flow [B, F, C, H, W] in the latents' dtype.
        """
        return self.run(latents, self.condition(timesteps), self.rotation.at(frame_index), memory)

    def run(
        self, latents: Tensor, conditioning: Conditioning, rotation: Tensor, memory: AttentionMemory
    ) -> Tensor:
        """Run `forward` with given conditioning and rotation, which callers may cache.

        latents [B, F, C, H, W]; rotation as `Rotation.at` returns it. Returns the flow [B, F, C, H, W].
        """
        return self.unpatchify(self.run_tokens(self.patchify(latents), conditioning, rotation, memory))

    def run_tokens(
        self, x: Tensor, conditioning: Conditioning, rotation: Tensor, memory: AttentionMemory
    ) -> Tensor:
        """Run the blocks over tokens x [B, F, T, dim], which need not be all of a frame's.

        Returns their patch channels [B, F, T, ·]. Only `memory` relates tokens to each other.
        """
        for layer, (block, modulation) in enumerate(zip(self._blocks, conditioning.blocks, strict=True)):
            x = block(layer, x, modulation, rotation, memory)
        channels: Tensor = self.head(x, conditioning.head)
        return channels

    def condition(self, timesteps: Tensor) -> Conditioning:
        """Modulations of timesteps [B, F], float in 0..1000."""
        weight = self.patch_embedding.weight
        time: Tensor = self.time_embedding(self._sinusoid(timesteps).to(weight.dtype))
        return Conditioning(self._modulations(time), self._head_modulation(time))

    def fuse(self) -> None:
        """Fuse the blocks for inference, once the weights are on their device. See `Attention.fuse`."""
        for block in self._blocks:
            block.self_attn.fuse()

    def compile_blocks(self, backend: str | None) -> None:
        """Compile the operations between two attentions at their first use, once for all blocks. None: do
        not.

        Attention itself reads rings in place and is not compiled. `run` then takes rotations as real numbers.
        """
        parts = Block.parts if backend is None else compiled_parts(backend)
        for block in self._blocks:
            block.parts = parts

    def project_text(self, text: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Prompt embeddings [B, L, text_dim], L ≤ text_len → per layer its cross-attention keys and values.

        Each is [B, text_len, heads, head_dim]. Padding tokens are zero vectors before the projection, and are
        attended to like any other, as in the references.
        """
        limit = self.config.text_len
        if text.shape[1] > limit:
            raise ValueError(f"text: {text.shape[1]} tokens exceed the model's text_len of {limit}")
        x = self.text_embedding(F.pad(text, (0, 0, 0, limit - text.shape[1])))
        return [(block.cross_attn.keys(x), block.cross_attn.values(x)) for block in self._blocks]

    @property
    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    def _modulations(self, time: Tensor) -> Tensor:
        """Time embedding [B, F, dim] → [layers, 6, B, F, 1, dim], 1 already added to the scales."""
        shared: Tensor = self.time_projection(time).view(*time.shape[:2], 6, -1)
        own: Tensor = torch.cat([block.modulation for block in self._blocks])
        # Adding the scales' 1 to the small table of parameters saves an addition per layer over all tokens.
        own[:, 1::3].add_(1)
        batch, frames = time.shape[:2]
        table = own.view(self.config.num_layers, 6, 1, 1, 1, -1)
        return table + shared.permute(2, 0, 1, 3).view(1, 6, batch, frames, 1, -1)

    def _head_modulation(self, time: Tensor) -> Tensor:
        """Time embedding [B, F, dim] → [2, B, F, 1, dim], 1 already added to the scale."""
        own = self.head.modulation.clone()
        own[:, 1].add_(1)
        return (time.unsqueeze(2) + own).permute(2, 0, 1, 3).unsqueeze(3)

    def patchify(self, latents: Tensor) -> Tensor:
        """[B, F, C, H, W] → tokens [B, F, T, dim]."""
        batch, frames, channels = latents.shape[:3]
        rows, columns = self.config.grid
        _, height, width = self.config.patch_size
        patches = latents.view(batch, frames, channels, rows, height, columns, width)
        patches = patches.permute(0, 1, 3, 5, 2, 4, 6).reshape(batch, frames, rows * columns, -1)
        tokens: Tensor = F.linear(patches, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)
        return tokens + self.position_embedding if self.config.learned_positions else tokens

    def unpatchify(self, x: Tensor) -> Tensor:
        """Patch channels [B, F, T, ·] → [B, F, C, H, W]."""
        rows, columns = self.config.grid
        _, height, width = self.config.patch_size
        batch, frames = x.shape[:2]
        x = x.view(batch, frames, rows, columns, height, width, self.config.out_dim)
        x = x.permute(0, 1, 6, 2, 4, 3, 5)
        return x.reshape(batch, frames, self.config.out_dim, rows * height, columns * width)

    def _sinusoid(self, timesteps: Tensor) -> Tensor:
        """[B, F] → cosines then sines [B, F, freq_dim], in float64, which timesteps near 1000 require."""
        half = self.config.freq_dim // 2
        steps = torch.arange(half, dtype=torch.float64, device=timesteps.device)
        angles = timesteps.to(torch.float64).unsqueeze(-1) * torch.pow(10000.0, -steps / half)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

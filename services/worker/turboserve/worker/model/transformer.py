"""The causal Wan transformer (Wan 2.1 T2V as Self-Forcing and LongLive run it), apart from its memory.

Parameter names are those of the public checkpoints. What a token may attend to is not decided here: the model
asks a `Memory`, which training fills with a mask and the engine with its KV ring.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.rope import Rotation, rotate


class Memory(Protocol):
    """What the rows of one forward remember: earlier frames and a prompt. One call of each per layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Self-attention. q, k, v: [B, F·T, heads, head_dim], q and k already rotated. Returns q's shape."""
        ...

    def attend_text(self, layer: int, q: Tensor) -> Tensor:
        """Attention over each row's prompt. q: [B, F·T, heads, head_dim]. Returns q's shape."""
        ...


class Conditioning(NamedTuple):
    """What timesteps make of a model's modulations; 1 is already added to every scale.

    Batch and frames may be 1 where all rows or frames have one timestep.
    """

    blocks: Tensor
    """[layers, 6, B, F, 1, dim]"""
    head: Tensor
    """[2, B, F, 1, dim]"""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the whole width, not per head."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] → [..., dim]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Projections of one attention; who attends to what is the memory's business."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.q = nn.Linear(config.dim, config.dim)
        self.k = nn.Linear(config.dim, config.dim)
        self.v = nn.Linear(config.dim, config.dim)
        self.o = nn.Linear(config.dim, config.dim)
        self.norm_q = RMSNorm(config.dim, config.eps)
        self.norm_k = RMSNorm(config.dim, config.eps)
        self._fused: tuple[Tensor, Tensor, Tensor] | None = None

    @torch.no_grad()
    def fuse(self) -> None:
        """Lay the three projections out as one matrix, which the parameters become views of: for inference.

        Costs no memory. A module that moved, or whose parameters were replaced, works as before `fuse`.
        """
        if self._is_fused():
            return
        linears = (self.q, self.k, self.v)
        weight = torch.cat([linear.weight.detach() for linear in linears])
        bias = torch.cat([linear.bias.detach() for linear in linears])
        for linear, rows, row in zip(linears, weight.chunk(3), bias.chunk(3), strict=True):
            linear.weight.data, linear.bias.data = rows, row
        norms = torch.stack([self.norm_q.weight.detach(), self.norm_k.weight.detach()])
        self._fused = weight, bias, norms

    def _is_fused(self) -> bool:
        return (
            self._fused is not None
            and not torch.is_grad_enabled()
            and self._fused[0].data_ptr() == self.q.weight.data_ptr()
        )

    def rotated(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, dim] → rotated queries, rotated keys, values, each [B, S, heads, head_dim]."""
        if not self._is_fused() or self._fused is None:
            return rotate(self.queries(x), rotation), rotate(self.keys(x), rotation), self.values(x)
        weight, bias, norms = self._fused
        batch, tokens, dim = x.shape
        qk, v = torch.split(F.linear(x, weight, bias), [2 * dim, dim], dim=-1)
        qk = F.rms_norm(qk.view(batch, tokens, 2, dim), (dim,), eps=self.norm_q.eps) * norms
        q, k = rotate(qk.view(batch, tokens, 2 * self.heads, -1), rotation).chunk(2, dim=2)
        return q, k, self._heads(v)

    def queries(self, x: Tensor) -> Tensor:
        """[B, S, dim] → normed queries [B, S, heads, head_dim]."""
        return self._heads(self.norm_q(self.q(x)))

    def keys(self, x: Tensor) -> Tensor:
        """[B, S, dim] → normed keys [B, S, heads, head_dim], not rotated."""
        return self._heads(self.norm_k(self.k(x)))

    def values(self, x: Tensor) -> Tensor:
        """[B, S, dim] → values [B, S, heads, head_dim]."""
        return self._heads(self.v(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1)


class Block(nn.Module):
    """Self-attention, cross-attention over the prompt, feed-forward; modulated per frame by the timestep."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = (config.dim,)
        self.eps = config.eps
        self.self_attn = Attention(config)
        self.norm3 = nn.LayerNorm(config.dim, config.eps)
        self.cross_attn = Attention(config)
        self.ffn = nn.Sequential(
            nn.Linear(config.dim, config.ffn_dim),
            nn.GELU(approximate="tanh"),
            nn.Linear(config.ffn_dim, config.dim),
        )
        self.modulation = nn.Parameter(torch.randn(1, 6, config.dim) / config.dim**0.5)

    def forward(self, layer: int, x: Tensor, modulation: Tensor, rotation: Tensor, memory: Memory) -> Tensor:
        """x [B, F, T, dim], modulation [6, B, F, 1, dim] with 1 already added to both scales → x's shape."""
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.unbind(0)

        h = torch.addcmul(shift1, F.layer_norm(x, self.width, eps=self.eps), scale1).flatten(1, 2)
        h = memory.attend(layer, *self.self_attn.rotated(h, rotation))
        x = torch.addcmul(x, self.self_attn.o(h.flatten(2)).view_as(x), gate1)

        h = memory.attend_text(layer, self.cross_attn.queries(self.norm3(x).flatten(1, 2)))
        x = x + self.cross_attn.o(h.flatten(2)).view_as(x)

        h = torch.addcmul(shift2, F.layer_norm(x, self.width, eps=self.eps), scale2)
        h = self.ffn[2](gelu(self.ffn[0](h)))
        return torch.addcmul(x, h, gate2)


def gelu(x: Tensor) -> Tensor:
    """GELU, tanh approximation. On a CPU as x·σ(2·√(2/π)·(x + 0.044715·x³)): the same, in half the time."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_grad_enabled():
        return F.gelu(x, approximate="tanh")
    scale = 2 * math.sqrt(2 / math.pi)
    inner = (x * x).mul_(0.044715 * scale).add_(scale)
    return inner.mul_(x).sigmoid_().mul_(x)


class Head(nn.Module):
    """Final norm, modulation and projection to one patch's channels."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = (config.dim,)
        self.eps = config.eps
        self.head = nn.Linear(config.dim, math.prod(config.patch_size) * config.out_dim)
        self.modulation = nn.Parameter(torch.randn(1, 2, config.dim) / config.dim**0.5)

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        """x [B, F, T, dim], modulation [2, B, F, 1, dim] with 1 added to the scale → patch channels
        [B, F, T, ·]."""
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
        """Initial weights for training, as Wan's: Xavier for linear layers, the head at zero."""
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

    def forward(self, latents: Tensor, timesteps: Tensor, frame_index: Tensor, memory: Memory) -> Tensor:
        """One forward over rows that may differ in everything but their number of frames.

        latents [B, F, C, H, W]; timesteps [B, F] float in 0..1000; frame_index [B, F] long, absolute in the
        row's session. Returns the flow [B, F, C, H, W] in the latents' dtype.
        """
        return self.run(latents, self.condition(timesteps), self.rotation.at(frame_index), memory)

    def run(self, latents: Tensor, conditioning: Conditioning, rotation: Tensor, memory: Memory) -> Tensor:
        """`forward` with what depends on timesteps and frame indices alone given: callers may keep that.

        latents [B, F, C, H, W]; rotation as `Rotation.at` gives it. Returns the flow [B, F, C, H, W].
        """
        x = self._patchify(latents)
        for layer, (block, modulation) in enumerate(zip(self._blocks, conditioning.blocks, strict=True)):
            x = block(layer, x, modulation, rotation, memory)
        return self._unpatchify(self.head(x, conditioning.head))

    def condition(self, timesteps: Tensor) -> Conditioning:
        """Modulations of timesteps [B, F], float in 0..1000."""
        weight = self.patch_embedding.weight
        time: Tensor = self.time_embedding(self._sinusoid(timesteps).to(weight.dtype))
        return Conditioning(self._modulations(time), self._head_modulation(time))

    def fuse(self) -> None:
        """See `Attention.fuse`: for inference, once the weights are where they stay."""
        for block in self._blocks:
            block.self_attn.fuse()

    def project_text(self, text: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Prompt embeddings [B, L, text_dim], L ≤ text_len → per layer its cross-attention keys and values.

        Each is [B, text_len, heads, head_dim]. Padding tokens are zero vectors before the projection, and are
        attended to like any other (as the references do).
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

    def _patchify(self, latents: Tensor) -> Tensor:
        """[B, F, C, H, W] → tokens [B, F, T, dim]."""
        batch, frames, channels = latents.shape[:3]
        rows, columns = self.config.grid
        _, height, width = self.config.patch_size
        patches = latents.view(batch, frames, channels, rows, height, columns, width)
        patches = patches.permute(0, 1, 3, 5, 2, 4, 6).reshape(batch, frames, rows * columns, -1)
        tokens: Tensor = F.linear(patches, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)
        return tokens + self.position_embedding if self.config.learned_positions else tokens

    def _unpatchify(self, x: Tensor) -> Tensor:
        """Patch channels [B, F, T, ·] → [B, F, C, H, W]."""
        rows, columns = self.config.grid
        _, height, width = self.config.patch_size
        batch, frames = x.shape[:2]
        x = x.view(batch, frames, rows, columns, height, width, self.config.out_dim)
        x = x.permute(0, 1, 6, 2, 4, 3, 5)
        return x.reshape(batch, frames, self.config.out_dim, rows * height, columns * width)

    def _sinusoid(self, timesteps: Tensor) -> Tensor:
        """[B, F] → cosines then sines [B, F, freq_dim], in float64: timesteps near 1000 need it."""
        half = self.config.freq_dim // 2
        steps = torch.arange(half, dtype=torch.float64, device=timesteps.device)
        angles = timesteps.to(torch.float64).unsqueeze(-1) * torch.pow(10000.0, -steps / half)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

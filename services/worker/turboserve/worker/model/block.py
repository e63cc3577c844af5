"""One block of the causal Wan transformer, without the choice of what each token attends to.

Parameter names are those of the public checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.rope import rotate

Parts = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]


class AttentionMemory(Protocol):
    """Memory of the rows of one forward: earlier frames and a prompt. One call of each method per layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Self-attention. q, k, v: [B, F·T, heads, head_dim], q and k already rotated. Returns q's shape."""
        ...

    def attend_text(self, layer: int, q: Tensor) -> Tensor:
        """Attention over each row's prompt. q: [B, F·T, heads, head_dim]. Returns q's shape."""
        ...


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
    """Projections of one attention. The memory determines what each token attends to."""

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
        """Store the three projections as one matrix, of which the parameters become views, for inference.

        This costs no memory. A module that was moved, or whose parameters were replaced, works as before
        `fuse`.
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
        if self._fused is None or torch.is_grad_enabled():
            return False
        # A compiler has no data addresses. It runs only where a fused module does not change.
        return torch.compiler.is_compiling() or self._fused[0].data_ptr() == self.q.weight.data_ptr()

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

    def forward(
        self, layer: int, x: Tensor, modulation: Tensor, rotation: Tensor, memory: AttentionMemory
    ) -> Tensor:
        """x [B, F, T, dim], modulation [6, B, F, 1, dim] with 1 already added to both scales → x's shape."""
        before, between, after = self.parts
        h = memory.attend(layer, *before(self, x, modulation, rotation))
        x, q = between(self, x, h, modulation)
        h = memory.attend_text(layer, q)
        # The feed-forward is the part of a block that takes the most memory.
        del q
        out: Tensor = after(self, x, h, modulation)
        return out

    def before_attention(
        self, x: Tensor, modulation: Tensor, rotation: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of self-attention: q, k, v [B, F·T, heads, head_dim], q and k rotated."""
        shift, scale = modulation[0], modulation[1]
        h = torch.addcmul(shift, F.layer_norm(x, self.width, eps=self.eps), scale).flatten(1, 2)
        return self.self_attn.rotated(h, rotation)

    def between_attentions(self, x: Tensor, h: Tensor, modulation: Tensor) -> tuple[Tensor, Tensor]:
        """x plus self-attention's result, h [B, F·T, heads, head_dim]; and the queries over the prompt."""
        x = torch.addcmul(x, self.self_attn.o(h.flatten(2)).view_as(x), modulation[2])
        return x, self.cross_attn.queries(self.norm3(x).flatten(1, 2))

    def after_attentions(self, x: Tensor, h: Tensor, modulation: Tensor) -> Tensor:
        """x plus the result of attention over the prompt, then through the feed-forward."""
        x = x + self.cross_attn.o(h.flatten(2)).view_as(x)
        h = torch.addcmul(modulation[3], F.layer_norm(x, self.width, eps=self.eps), modulation[4])
        h = self.ffn[2](gelu(self.ffn[0](h)))
        return torch.addcmul(x, h, modulation[5])

    parts: Parts = before_attention, between_attentions, after_attentions
    """The computations before, between and after the attentions; `compiled_parts` returns compiled ones."""


def compiled_parts(backend: str) -> Parts:
    """The parts of a block, compiled by torch's compiler for any number of rows, frames and tokens."""
    before, between, after = (
        torch.compile(part, backend=backend, fullgraph=True, dynamic=True) for part in Block.parts
    )
    return before, between, after


def gelu(x: Tensor) -> Tensor:
    """GELU, tanh approximation. On a CPU it is computed as x·σ(2·√(2/π)·(x + 0.044715·x³)), which is equal
    and takes half the time."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_grad_enabled():
        return F.gelu(x, approximate="tanh")
    scale = 2 * math.sqrt(2 / math.pi)
    inner = (x * x).mul_(0.044715 * scale).add_(scale)
    return inner.mul_(x).sigmoid_().mul_(x)

"""Attention over the key blocks that score highest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sparsity: float,
    block: int,
    by: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Softmax attention over the key blocks that score highest (block top-k).

    Each head selects blocks for all of its queries: a block's score is the mean query times the mean key of
    the block. `block` divides the number of keys. At sparsity 0 no block is skipped.
    `by` computes the attention over the selected keys (`kv_ring.Attention`).

    q: [1, S, heads, head_dim]; k, v: [1, heads, N, head_dim]. Returns q's shape.
    """
    heads, keys, width = k.shape[1:]
    blocks = keys // block
    kept = blocks - int(blocks * sparsity)
    queries = q.transpose(1, 2)
    if kept < blocks:
        means = k[0].view(heads, blocks, block, width).mean(2)
        scores = torch.einsum("hd,hnd->hn", queries[0].mean(1), means)
        # The order of keys does not matter: it is kept, so that equal selections give equal bits.
        chosen = scores.topk(kept, dim=1).indices.sort(dim=1).values
        index = chosen.view(heads, kept, 1, 1).expand(heads, kept, block, width)
        k, v = (
            x[0].reshape(heads, blocks, block, width).gather(1, index).flatten(1, 2).unsqueeze(0)
            for x in (k, v)
        )
    return by(q, k, v)

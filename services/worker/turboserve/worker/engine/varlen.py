"""Attention of all rows of a forward at once, each over its own ring, in place.

The slabs of all sessions are one tensor, so that every row's keys are a run of tokens in it. Attention over
runs of different lengths ("varlen") needs their starts and lengths, and no copy, no padding and no mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from turboserve.worker.engine.errors import AttentionUnavailableError
from turboserve.worker.engine.streams import to_device
from turboserve.worker.engine.work import Row, RowsMemory


class Runs:
    """Start and number of each row's keys in the pool, equal for all layers except for an offset."""

    def __init__(self, firsts: Sequence[Tensor], counts: Sequence[int], queries: int) -> None:
        """Copy the starts and lengths to the device.

        `firsts`: for each row a view of the pool that begins at its first key, of any layer. `queries`:
        number of queries of each row.
        """
        device = firsts[0].device
        width = firsts[0].shape[-2] * firsts[0].shape[-1]
        starts = [first.storage_offset() // width for first in firsts]
        rows = len(counts)
        self.longest = max(counts)
        self.queries = queries
        # One small copy before the forward, none during it.
        numbers = to_device(
            torch.tensor([*starts, 0, *counts, *range(0, (rows + 1) * queries, queries)]).to(torch.int32),
            device,
        )
        self.starts, self.counts, self.by_query = torch.split(numbers, [rows + 1, rows, rows + 1])


class VarlenMemory:
    """The transformer's memory for rows of one pool, with one attention for all of them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        reduced = any(row.placement.reads or row.placement.sparsity for row in rows)
        self._row_by_row = RowsMemory(rows) if reduced else None
        """Set where a row reads less than one run of the pool: the rows are then computed one by one."""
        slabs = [row.ring.slab for row in rows]
        self._keys, self._values = _whole(slabs[0].keys, slabs[0].values)
        self._text_keys, self._text_values = _whole(slabs[0].text_keys, slabs[0].text_values)
        self._layer_tokens = slabs[0].keys[0].shape[:2].numel()
        self._text_tokens = slabs[0].text_keys.shape[1]
        queries = rows[0].latents.shape[0] * slabs[0].keys.shape[2]
        self._runs = Runs([slab.keys for slab in slabs], [row.placement.visible for row in rows], queries)
        self._text_runs = Runs([slab.text_keys for slab in slabs], [self._text_tokens] * len(rows), queries)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionMemory.attend`."""
        if self._row_by_row is not None:
            return self._row_by_row.attend(layer, q, k, v)
        for i, row in enumerate(self._rows):
            row.ring.write(layer, row.placement, k[i : i + 1], v[i : i + 1])
        skipped = layer * self._layer_tokens
        return varlen(q, self._keys[skipped:], self._values[skipped:], self._runs)

    def attend_text(self, layer: int, q: Tensor) -> Tensor:
        """See `AttentionMemory.attend_text`."""
        skipped = layer * self._text_tokens
        return varlen(q, self._text_keys[skipped:], self._text_values[skipped:], self._text_runs)


def varlen(q: Tensor, keys: Tensor, values: Tensor, runs: Runs) -> Tensor:
    """Attend with q [B, S, heads, head_dim] over each row's run of keys and values. Returns q's shape.

    `keys`, `values`: [tokens, heads, head_dim]. On a GPU this is one call of PyTorch's varlen attention. A
    CPU has none and computes the same row by row.
    """
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            q.flatten(0, 1),
            keys,
            values,
            runs.by_query,
            runs.starts,
            runs.queries,
            runs.longest,
            seqused_k=runs.counts,
        )
        assert isinstance(out, Tensor)
        return out.view(q.shape)
    made = []
    for row, start, count in zip(q, runs.starts.tolist(), runs.counts.tolist(), strict=False):
        k, v = keys.narrow(0, start, count), values.narrow(0, start, count)
        out = F.scaled_dot_product_attention(row.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
        made.append(out.transpose(0, 1))
    return torch.stack(made)


def require_varlen(device: torch.device, dtype: torch.dtype) -> None:
    """Raise `AttentionUnavailableError` where a GPU's varlen attention lacks this type, or runs in a pool."""
    if device.type != "cuda":
        return
    if dtype not in (torch.bfloat16, torch.float16):
        raise AttentionUnavailableError("varlen", f"{dtype}: a GPU does it in bfloat16 and float16")
    from torch.nn.attention.varlen import varlen_attn

    if "seqused_k" not in inspect.signature(varlen_attn).parameters:
        reason = f"torch {torch.__version__} cannot attend to runs with gaps between them"
        raise AttentionUnavailableError("varlen", reason)


def _whole(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """All tokens of two views' pool, [tokens, heads, head_dim]: as keys, and from the first slab's values
    on."""
    heads, width = keys.shape[-2:]
    token = heads * width
    total = keys.untyped_storage().nbytes() // keys.element_size() // token
    between = (values.storage_offset() - keys.storage_offset()) // token
    whole = keys.as_strided((total, heads, width), (token, width, 1), 0)
    return whole, whole[between:]

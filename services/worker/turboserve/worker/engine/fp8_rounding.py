"""Rounds tensors to e4m3 on a GPU in one pass; torch's own operations take several.

The kernel is written in Triton, which torch installs on machines with NVIDIA GPUs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
BLOCK = 2048
"""Numbers that one program of the kernel rounds."""


def round_on_gpu(x: Tensor, descale: Tensor) -> Tensor:
    """Round `x` / `descale` to e4m3. x: [1, heads, tokens, head_dim]. `descale` has one number.

    The result is dense, in x's order if the heads of each token of x are adjacent in memory.
    """
    heads, tokens, width = x.shape[1:]
    if x.stride(1) == width:
        result = torch.empty(tokens, heads, width, dtype=FP8, device=x.device).transpose(0, 1).unsqueeze(0)
        rows, columns, stride = tokens, heads * width, x.stride(2)
    else:
        x = x.contiguous()
        result = torch.empty_like(x, dtype=FP8)
        rows, columns, stride = heads, tokens * width, tokens * width
    if stride == columns:
        rows, columns = 1, rows * columns
    grid = (-(-columns // BLOCK), rows)
    _kernel()[grid](x, descale, result, columns, stride, LARGEST=LARGEST, BLOCK=BLOCK)
    return result


@lru_cache
def _kernel() -> Any:
    # Machines without a GPU lack the package.
    import triton
    from triton import language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(x, descale, result, columns, stride, LARGEST: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        row = tl.program_id(1).to(tl.int64)
        inside = column < columns
        number = tl.load(x + row * stride + column, mask=inside).to(tl.float32) / tl.load(descale)
        number = tl.minimum(tl.maximum(number, -LARGEST), LARGEST)
        tl.store(result + row * columns + column, number.to(tl.float8e4nv), mask=inside)

    return kernel

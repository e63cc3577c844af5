"""One layer's self-attention with every available kernel, on memory with the layout of a slab."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from turboserve.bench.engine.measure import Timer
from turboserve.worker.engine.fp8_attention import fp8_attention, require_fp8
from turboserve.worker.engine.varlen import Runs, require_varlen, varlen
from turboserve.worker.model.config import ModelConfig

CHECKED = 64
"""Number of queries whose result is compared."""
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v [1, tokens, heads, head_dim] → q's shape."""


def attention_kernels(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, repeats: int
) -> dict[str, dict[str, Any]]:
    """Measure a chunk's queries over a full window with each kernel.

    Returns seconds, operations per second, and the largest and the relative error against float32, or why a
    kernel is not available.
    """
    shape = (config.num_heads, config.head_dim)
    tokens = config.frames_per_chunk * config.tokens_per_frame
    keys = config.window_frames * config.tokens_per_frame
    torch.manual_seed(0)
    with torch.inference_mode():
        q = torch.randn(1, tokens, *shape, device=device, dtype=dtype)
        k, v = (torch.randn(1, keys, *shape, device=device, dtype=dtype) for _ in range(2))
        exact = _sdpa(q[:, :CHECKED].float(), k.float(), v.float())
        found: dict[str, dict[str, Any]] = {}
        for name, kernel in _kernels(device, dtype).items():
            try:
                error = kernel(q, k, v)[:, :CHECKED].float() - exact
                seconds = Timer(device).median(lambda run=kernel: run(q, k, v), repeats)  # type: ignore[misc]
            except Exception as refusal:
                # A kernel's compiler may raise any exception; its message is the result.
                reason = (str(refusal).splitlines() or [""])[0]
                found[name] = {"unavailable": f"{type(refusal).__name__}: {reason}"}
                continue
            flop = 4.0 * tokens * keys * config.dim
            found[name] = {
                "seconds": seconds,
                "flop_per_s": flop / seconds,
                "max_abs_error": float(error.abs().max()),
                "relative_error": float(error.norm() / exact.norm()),
            }
    return found


def _kernels(device: torch.device, dtype: torch.dtype) -> dict[str, Kernel]:
    return {
        "default": _sdpa,
        "flash": _only(SDPBackend.FLASH_ATTENTION),
        "efficient": _only(SDPBackend.EFFICIENT_ATTENTION),
        "cudnn": _only(SDPBackend.CUDNN_ATTENTION),
        "varlen": _varlen(device, dtype),
        "flex": _flex(device),
        "fp8": _fp8(device),
    }


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _only(backend: SDPBackend) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return _sdpa(q, k, v)

    return kernel


def _varlen(device: torch.device, dtype: torch.dtype) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        require_varlen(device, dtype)
        return varlen(q, k[0], v[0], Runs([k[0]], [k.shape[1]], q.shape[1]))

    return kernel


def _fp8(device: torch.device) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not q.is_cuda:
            require_fp8(q.shape[2], q.shape[3], device)
        return fp8_attention(q, k.transpose(1, 2), v.transpose(1, 2))

    return kernel


def _flex(device: torch.device) -> Kernel:
    if device.type != "cuda":

        def refused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            raise RuntimeError("compiled for GPUs only")

        return refused
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = compiled(q, k, v)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return kernel

"""Attention whose products are of 8-bit numbers (FP8, e4m3), by cuDNN's kernel.

Queries, keys and values are rounded when they are read, so the ring, states and migrations are those of the
other kinds. The kernel rounds the softmax weights and its result to e4m3 too: a GPU of compute capability 9
has no other type for the result. Sums are float32. Scales are powers of two, so that scaling rounds nothing.

The kernel needs the package `nvidia-cudnn-frontend`.
"""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from turboserve.worker.engine.errors import AttentionUnavailableError
from turboserve.worker.engine.fp8_rounding import FP8, LARGEST, round_on_gpu

WEIGHT_SCALE = 256.0
"""Scale of the softmax weights, which are at most 1 before they are divided by their sum."""
RESULT_MARGIN = 2.0
"""A result is an average of values. Rounded weights may have a larger sum than the one that divides them."""
LEAST_CAPABILITY = (9, 0)
LARGEST_HEAD = 128
_LEAST_DESCALE = 2.0**-40
_GRAPHS = 64
"""Number of graphs kept: one for each length and layout of keys."""


@dataclass(frozen=True, eq=False)
class Rounded:
    """A tensor in e4m3: `numbers` times `descale`."""

    numbers: Tensor
    """[1, heads, tokens, head_dim]"""
    descale: Tensor
    """Float32 [1, 1, 1, 1]."""


Kernel = Callable[[Rounded, Rounded, Rounded, Tensor], Tensor]
"""Queries, keys, values and the scale of the result → the result times that scale, in e4m3."""


def fp8_attention(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel | None = None) -> Tensor:
    """Softmax attention, rounded to e4m3. q: [1, S, heads, head_dim]; k, v: [1, heads, N, head_dim].

    Returns q's shape and type. `kernel`: None: cuDNN's.
    """
    one = torch.ones(1, 1, 1, 1, device=q.device)
    # The norm of queries and keys keeps them far from both ends of the type's range. Values have no norm.
    queries, keys, values = rounded(q.transpose(1, 2), one), rounded(k, one), rounded(v, descale_of(v))
    descale = values.descale * RESULT_MARGIN
    result = (kernel or cudnn_kernel)(queries, keys, values, descale.reciprocal())
    return result.to(q.dtype).mul_(descale.to(q.dtype)).transpose(1, 2)


def descale_of(x: Tensor) -> Tensor:
    """The least power of two by which all of a tensor's numbers fit e4m3 when they are divided by it."""
    largest = torch.linalg.vector_norm(x, math.inf).float().view(1, 1, 1, 1)
    least: Tensor = largest / LARGEST
    return least.clamp_min(_LEAST_DESCALE).log2().ceil().exp2()


def rounded(x: Tensor, descale: Tensor) -> Rounded:
    """Round a tensor [1, heads, tokens, head_dim]. Numbers beyond the type's largest become that."""
    if x.is_cuda:
        return Rounded(round_on_gpu(x, descale), descale)
    scaled = (x.float() / descale).clamp(-LARGEST, LARGEST)
    return Rounded(torch.empty_like(x, dtype=FP8).copy_(scaled), descale)


def reference_kernel(q: Rounded, k: Rounded, v: Rounded, scale: Tensor) -> Tensor:
    """The roundings of cuDNN's kernel in torch's float32, on any device: see `Kernel`."""
    scores = q.numbers.float() @ k.numbers.float().mT
    scores = scores * (q.descale * k.descale / math.sqrt(q.numbers.shape[-1]))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    rough = (weights * WEIGHT_SCALE).to(FP8).float() / WEIGHT_SCALE
    result = rough @ (v.numbers.float() * v.descale) / weights.sum(-1, keepdim=True)
    return (result * scale).to(FP8)


def cudnn_kernel(q: Rounded, k: Rounded, v: Rounded, scale: Tensor) -> Tensor:
    """cuDNN's kernel: see `Kernel`. The first call with a length of keys builds a graph."""
    # A handle belongs to one thread.
    graph = _graph(threading.get_ident(), q.numbers.device, *(_layout(x.numbers) for x in (q, k, v)))
    return graph(q, k, v, scale)


@torch.inference_mode()
def require_fp8(heads: int, head_dim: int, device: torch.device) -> None:
    """Raise `AttentionUnavailableError` if the device, or what is installed, lacks this attention."""
    if device.type != "cuda":
        raise AttentionUnavailableError("fp8", f"{device} is no GPU of compute capability 9.0 or higher")
    if (found := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        raise AttentionUnavailableError("fp8", f"compute capability {found[0]}.{found[1]}, 9.0 needed")
    if head_dim % 16 or head_dim > LARGEST_HEAD:
        raise AttentionUnavailableError(
            "fp8", f"heads of {head_dim} channels: 16 to 128 needed, in steps of 16"
        )
    try:
        tokens = torch.zeros(1, 128, heads, head_dim, device=device, dtype=torch.bfloat16)
        fp8_attention(tokens, tokens.transpose(1, 2), tokens.transpose(1, 2))
    except ImportError as error:
        raise AttentionUnavailableError(
            "fp8", f"install the package nvidia-cudnn-frontend ({error})"
        ) from error
    except Exception as error:
        # cuDNN's own errors have no common class.
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise AttentionUnavailableError("fp8", reason) from error


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


def _layout(x: Tensor) -> Layout:
    # The stride of a dimension of size 1 is arbitrary, and cuDNN takes it for what it says.
    return tuple(x.shape), (x.numel(), *x.stride()[1:])


class _Graph:
    """Attention of one layout of queries, keys and values, as cuDNN has planned it."""

    def __init__(self, device: torch.device, q: Layout, k: Layout, v: Layout) -> None:
        self._cudnn = cudnn = importlib.import_module("cudnn")
        self._device = device
        with torch.cuda.device(device):
            self._handle = _handle(threading.get_ident(), device)
        numbers, floats = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            io_data_type=numbers,
            intermediate_data_type=floats,
            compute_data_type=floats,
            handle=self._handle,
        )

        def tensor(name: str, layout: Layout, kind: Any) -> Any:
            return graph.tensor(name=name, dim=list(layout[0]), stride=list(layout[1]), data_type=kind)

        one = (1, 1, 1, 1)
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        scales = {name: tensor(name, (one, one), floats) for name in names}
        parts = {name: tensor(name, layout, numbers) for name, layout in (("q", q), ("k", k), ("v", v))}
        result, _, *largest = graph.sdpa_fp8(
            **parts,
            **scales,
            attn_scale=1 / math.sqrt(q[0][-1]),
            use_causal_mask=False,
            generate_stats=False,
            name="attention",
        )
        result.set_output(True).set_dim(list(q[0])).set_stride(list(q[1])).set_data_type(numbers)
        for each in largest:
            each.set_output(True).set_dim(list(one)).set_stride(list(one)).set_data_type(floats)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        self._graph, self._parts, self._scales, self._result = graph, parts, scales, result
        self._workspace_bytes = max(1, graph.get_workspace_size())
        scale = torch.full(one, WEIGHT_SCALE, device=device)
        self._constants = {
            scales["scale_s"]: scale,
            scales["descale_s"]: scale.reciprocal(),
            **{each: torch.empty(one, device=device) for each in largest},
        }

    def __call__(self, q: Rounded, k: Rounded, v: Rounded, scale: Tensor) -> Tensor:
        result = torch.empty_like(q.numbers)
        tensors = {**self._constants, self._result: result, self._scales["scale_o"]: scale}
        for name, each in (("q", q), ("k", k), ("v", v)):
            tensors |= {self._parts[name]: each.numbers, self._scales[f"descale_{name}"]: each.descale}
        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=self._device)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._cudnn.set_stream(handle=self._handle, stream=stream)
        self._graph.execute(tensors, workspace, handle=self._handle)
        return result


@lru_cache(_GRAPHS)
def _graph(thread: int, device: torch.device, q: Layout, k: Layout, v: Layout) -> _Graph:
    return _Graph(device, q, k, v)


@lru_cache
def _handle(thread: int, device: torch.device) -> Any:
    return importlib.import_module("cudnn").create_handle()

"""Limits of a device and the memory of a session, to compare the engine's times with."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from turboserve.bench.engine.measure import Sessions, Timer
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.transformer import CausalWanTransformer


def chunk_flop(config: ModelConfig) -> float:
    """Return the arithmetic of a chunk's forwards over a full window: linear layers and both attentions."""
    tokens = config.frames_per_chunk * config.tokens_per_frame
    width = config.dim
    # Keys and values of the prompt are computed once per prompt, not per forward.
    linear = config.num_layers * (6 * width * width + 2 * width * config.ffn_dim)
    keys = config.window_frames * config.tokens_per_frame + config.text_len
    attention = 4 * tokens * keys * width * config.num_layers
    return (len(config.denoising_steps) + 1) * (2.0 * linear * tokens + attention)


def matrix_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Measure the operations per second of a square matrix product, for the arithmetic floor."""
    left = torch.randn(side, side, device=device, dtype=dtype)
    right = torch.randn(side, side, device=device, dtype=dtype)
    rounds = 10

    def multiply() -> None:
        for _ in range(rounds):
            torch.mm(left, right)

    return rounds * 2.0 * side**3 / Timer(device).median(multiply, 5)


def slab_memory(model: CausalWanTransformer, text: torch.Tensor, device: torch.device) -> dict[str, int]:
    """Return the bytes that one session takes on the device, and those of the formula."""
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    sessions = Sessions(model, 1, text)
    taken = sessions.pool.allocated_bytes
    after = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else taken
    return {"slab_bytes": taken, "allocated_bytes": after, "expected_bytes": sessions.expected_bytes}


def suspend(
    model: CausalWanTransformer, text: torch.Tensor, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Measure the bandwidth between a slab and pinned host memory, on a stream of its own."""
    slab = Sessions(model, 1, text).states[0].slab
    on_device = [slab.keys, slab.values, slab.text_keys, slab.text_values]
    pinned = device.type == "cuda"
    on_host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=pinned) for t in on_device]
    stream = torch.cuda.Stream(device) if pinned else None
    total = sum(t.numel() * t.element_size() for t in on_device)

    def copied(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Callable[[], None]:
        def copy() -> None:
            with torch.cuda.stream(stream):
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
            if stream is not None:
                stream.synchronize()

        return copy

    original = [t.clone() for t in on_device]
    out_s = wall(copied(on_host, on_device), repeats)
    for tensor in on_device:
        tensor.zero_()
    if pinned:
        torch.cuda.synchronize(device)
    back_s = wall(copied(on_device, on_host), repeats)
    return {
        "bytes": total,
        "suspend_bytes_per_s": total / out_s,
        "resume_bytes_per_s": total / back_s,
        "bit_equal": all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(original, on_device, strict=True)
        ),
    }


def wall(work: Callable[[], None], repeats: int) -> float:
    """Return the median seconds of the wall clock."""
    work()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[len(seconds) // 2]

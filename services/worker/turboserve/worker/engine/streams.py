"""Differences between a CPU and a GPU in the engine: streams, waiting, and copies to the host."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE_LOST: tuple[type[Exception], ...] = (
    (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
)
"""Errors of a failed device: every later call fails too, for any session. An engine does not catch them,
because its process has to end; sessions continue elsewhere."""


def settle(device: torch.device) -> None:
    """Wait until all work that this thread launched is done. Never call it inside a forward."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def mark(device: torch.device) -> torch.cuda.Event | None:
    """An event after this thread's work so far, for another stream to wait for; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the host. A copy from a GPU is asynchronous, in page-locked memory: valid after
    `settle`."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small host tensor on the device, without waiting for the copy."""
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)

"""What differs between a CPU and a GPU in the engine: streams, waiting, and copies to the host."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE_LOST: tuple[type[Exception], ...] = (
    (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
)
"""What says that the device itself has failed: then every further call does, whatever the session. An engine
lets these through, for its process has to end; sessions go on elsewhere."""


def settle(device: torch.device) -> None:
    """Wait until what this thread launched is done. Between computations, never inside a forward."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def mark(device: torch.device) -> torch.cuda.Event | None:
    """What this thread's stream has been given so far, for another stream to wait for; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the host. From a GPU it comes asynchronously into page-locked memory: its contents are
    there after `settle`."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on the device, without waiting for it."""
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)

"""What networks weigh."""

from __future__ import annotations

from torch import nn


def weight_bytes(network: nn.Module) -> int:
    """Bytes of a network's parameters and buffers; what two names share counts once."""
    tensors = {id(t): t for t in (*network.parameters(), *network.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())

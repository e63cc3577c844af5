"""Slabs for a fixed number of sessions, allocated once: what does not fit is refused, never met as a
fault."""

from __future__ import annotations

import torch

from turboserve.worker.engine.errors import BudgetTooSmallError, SlabsExhaustedError
from turboserve.worker.engine.slab import Slab, SlabLayout


class SlabPool:
    """As many slabs as fit in `capacity_bytes`, on one device. Not thread-safe: the engine's thread owns
    it."""

    def __init__(self, layout: SlabLayout, capacity_bytes: int, device: torch.device) -> None:
        """Raises `BudgetTooSmallError` when not even one slab fits."""
        self.layout = layout
        self.slots = capacity_bytes // layout.total_bytes
        if self.slots < 1:
            raise BudgetTooSmallError(layout.total_bytes, capacity_bytes)
        frame = (layout.tokens_per_frame, layout.heads, layout.head_dim)
        text = (layout.text_len, layout.heads, layout.head_dim)

        def allocate(*shape: int) -> torch.Tensor:
            return torch.empty(self.slots, *shape, dtype=layout.dtype, device=device)

        self._frames = allocate(2, layout.layers, layout.frames, *frame)
        self._text = allocate(2, layout.layers, *text)
        self._sink = allocate(layout.layers, layout.kept_sink_frames, *frame)
        self._free = list(range(self.slots - 1, -1, -1))

    @property
    def free(self) -> int:
        """Slabs not in use."""
        return len(self._free)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the pool holds, used or not."""
        return sum(t.numel() * t.element_size() for t in (self._frames, self._text, self._sink))

    def acquire(self) -> Slab:
        """Take a slab; its contents are undefined. Raises `SlabsExhaustedError` when none is free."""
        if not self._free:
            raise SlabsExhaustedError(self.slots, self.layout.total_bytes)
        index = self._free.pop()
        keys, values = self._frames[index].unbind(0)
        text_keys, text_values = self._text[index].unbind(0)
        return Slab(index, keys, values, text_keys, text_values, self._sink[index])

    def release(self, slab: Slab) -> None:
        """Give a slab back. The caller keeps no view of it."""
        if slab.index in self._free:
            raise RuntimeError(f"slab {slab.index} released twice")
        self._free.append(slab.index)

"""Slabs for a fixed number of sessions, allocated once: a session that does not fit is refused."""

from __future__ import annotations

import torch

from turboserve.worker.engine.errors import BudgetTooSmallError, SlabsExhaustedError
from turboserve.worker.engine.slab import Slab, SlabLayout


class SlabPool:
    """As many slabs as fit in `capacity_bytes`, on one device. Not thread-safe: for the engine's thread."""

    def __init__(self, layout: SlabLayout, capacity_bytes: int, device: torch.device) -> None:
        """Allocate the slabs. Raises `BudgetTooSmallError` if not even one fits."""
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
        """Number of free slabs."""
        return len(self._free)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the pool holds, used or not."""
        return sum(t.numel() * t.element_size() for t in (self._frames, self._text, self._sink))

    def acquire(self) -> Slab:
        """Take a slab; its contents are undefined. Raises `SlabsExhaustedError` if none is free."""
        if not self._free:
            raise SlabsExhaustedError(self.slots, self.layout.total_bytes)
        index = self._free.pop()
        keys, values = self._frames[index].unbind(0)
        text_keys, text_values = self._text[index].unbind(0)
        return Slab(index, keys, values, text_keys, text_values, self._sink[index])

    def release(self, slab: Slab) -> None:
        """Return a slab. The caller must keep no view of it."""
        if slab.index in self._free:
            raise RuntimeError(f"slab {slab.index} released twice")
        self._free.append(slab.index)

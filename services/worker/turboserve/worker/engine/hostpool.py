"""Host memory for suspended sessions: one arena of a fixed size, page-locked where a GPU copies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turboserve.worker.engine.errors import HostMemoryUnavailableError, HostPoolFullError

ALIGNMENT = 256
"""Alignment in bytes: every extent and every tensor in one begins at a multiple."""


def aligned(size: int) -> int:
    """`size` rounded up to the pool's alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Extent:
    """A piece of the arena, in bytes."""

    start: int
    size: int


class HostPool:
    """Allocates pieces of the arena, first fit. Not thread-safe: the engine's thread owns it."""

    def __init__(self, limit_bytes: int, pinned: bool) -> None:
        """Allocate page-locked memory now, because that takes seconds; other memory at the first use.

        Raises `HostMemoryUnavailableError`.
        """
        self.limit_bytes = limit_bytes
        self._pinned = pinned
        self._arena: Tensor | None = None
        self._free: list[Extent] = [Extent(0, limit_bytes)] if limit_bytes else []
        if pinned and limit_bytes:
            self._allocate()

    @property
    def used_bytes(self) -> int:
        """Bytes allocated."""
        return self.limit_bytes - self.free_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes not allocated, in any number of pieces."""
        return sum(extent.size for extent in self._free)

    def take(self, size: int) -> Extent:
        """Allocate a piece of at least `size` bytes. Raises `HostPoolFullError`; then nothing has changed."""
        size = aligned(max(size, 1))
        for place, free in enumerate(self._free):
            if free.size >= size:
                rest = Extent(free.start + size, free.size - size)
                self._free[place : place + 1] = [rest] if rest.size else []
                return Extent(free.start, size)
        largest = max((free.size for free in self._free), default=0)
        raise HostPoolFullError(size, self.free_bytes, self.limit_bytes, largest)

    def give_back(self, extent: Extent) -> None:
        """Free a piece. Its tensors are overwritten later."""
        pieces = sorted([*self._free, extent], key=lambda piece: piece.start)
        merged = pieces[:1]
        for piece in pieces[1:]:
            last = merged[-1]
            if piece.start < last.start + last.size:
                raise RuntimeError(f"host pool: {extent} was given back twice")
            if piece.start == last.start + last.size:
                merged[-1] = Extent(last.start, last.size + piece.size)
            else:
                merged.append(piece)
        self._free = merged

    def shorten(self, extent: Extent, size: int) -> Extent:
        """Free what lies behind the first `size` bytes of a piece. Returns the rest of the piece."""
        size = aligned(max(size, 1))
        if size >= extent.size:
            return extent
        self.give_back(Extent(extent.start + size, extent.size - size))
        return Extent(extent.start, size)

    def tensors(self, extent: Extent, like: dict[str, Tensor]) -> dict[str, Tensor]:
        """Contiguous tensors in a piece, with the shapes and types of `like`. Raises
        `HostMemoryUnavailableError`."""
        arena = self._allocate() if self._arena is None else self._arena
        placed, at = {}, extent.start
        for name, tensor in like.items():
            size = tensor.numel() * tensor.element_size()
            placed[name] = arena[at : at + size].view(tensor.dtype).view(tensor.shape)
            at += aligned(size)
        return placed

    def _allocate(self) -> Tensor:
        try:
            self._arena = torch.empty(self.limit_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        except RuntimeError as error:
            raise HostMemoryUnavailableError(self.limit_bytes, str(error)) from error
        return self._arena


def size_of(tensors: dict[str, Tensor]) -> int:
    """Bytes that tensors take in a pool."""
    return sum(aligned(t.numel() * t.element_size()) for t in tensors.values())

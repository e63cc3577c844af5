"""Memory for sessions' states: slabs on the device, and one pool on the host for suspended sessions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from turboserve.worker.engine.errors import (
    BudgetTooSmallError,
    HostMemoryUnavailableError,
    HostPoolFullError,
    SlabsExhaustedError,
)
from turboserve.worker.model.config import ModelConfig

T = TypeVar("T")


@dataclass(frozen=True)
class SlabLayout:
    """Sizes of a slab. One ring position per latent frame of the window, for all layers."""

    layers: int
    frames: int
    tokens_per_frame: int
    heads: int
    head_dim: int
    text_len: int
    kept_sink_frames: int
    """Number of sink frames whose keys are also kept as written, for window rotation."""
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype) -> SlabLayout:
        """The layout for a model's sessions."""
        windowed = config.local_attn_size != -1
        return cls(
            layers=config.num_layers,
            frames=config.window_frames,
            tokens_per_frame=config.tokens_per_frame,
            heads=config.num_heads,
            head_dim=config.head_dim,
            text_len=config.text_len,
            kept_sink_frames=config.sink_size if windowed and config.rotation == "window" else 0,
            dtype=dtype,
        )

    @property
    def self_bytes(self) -> int:
        """Bytes of the self-attention keys and values of all ring positions."""
        return 2 * self.frames * self._frame_bytes

    @property
    def text_bytes(self) -> int:
        """Bytes of the cross-attention keys and values of one prompt."""
        return 2 * self.layers * self.text_len * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def sink_bytes(self) -> int:
        """Bytes of the sink's keys as written; zero for absolute rotation."""
        return self.kept_sink_frames * self._frame_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of one slab."""
        return self.self_bytes + self.text_bytes + self.sink_bytes

    @property
    def _frame_bytes(self) -> int:
        return self.layers * self.tokens_per_frame * self.heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Slab:
    """Views of one slab of the pool, number `index`."""

    index: int
    keys: Tensor
    """[layers, frames, tokens, heads, head_dim]"""
    values: Tensor
    """[layers, frames, tokens, heads, head_dim]"""
    text_keys: Tensor
    """[layers, text_len, heads, head_dim]"""
    text_values: Tensor
    """[layers, text_len, heads, head_dim]"""
    sink_keys: Tensor
    """[layers, kept_sink_frames, tokens, heads, head_dim], as written"""


class SlabPool:
    """As many slabs as fit in `capacity_bytes`, on one device. Not thread-safe: for the engine's thread."""

    def __init__(self, layout: SlabLayout, capacity_bytes: int, device: torch.device) -> None:
        """Allocate the slabs. Raises `BudgetTooSmallError` if not even one fits."""
        self.layout = layout
        self.slabs = capacity_bytes // layout.total_bytes
        if self.slabs < 1:
            raise BudgetTooSmallError(layout.total_bytes, capacity_bytes)
        frame = (layout.tokens_per_frame, layout.heads, layout.head_dim)
        text = (layout.text_len, layout.heads, layout.head_dim)

        def allocate(*shape: int) -> torch.Tensor:
            return torch.empty(self.slabs, *shape, dtype=layout.dtype, device=device)

        self._frames = allocate(2, layout.layers, layout.frames, *frame)
        self._text = allocate(2, layout.layers, *text)
        self._sink = allocate(layout.layers, layout.kept_sink_frames, *frame)
        self._free = list(range(self.slabs - 1, -1, -1))

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
            raise SlabsExhaustedError(self.slabs, self.layout.total_bytes)
        index = self._free.pop()
        keys, values = self._frames[index].unbind(0)
        text_keys, text_values = self._text[index].unbind(0)
        return Slab(index, keys, values, text_keys, text_values, self._sink[index])

    def acquire_for(self, build: Callable[[Slab], T]) -> T:
        """Return the result of `build` for a free slab. The slab is released if `build` fails."""
        slab = self.acquire()
        try:
            return build(slab)
        except BaseException:
            self.release(slab)
            raise

    def placeholder(self) -> Slab:
        """A slab without memory, for the state of a session that waits for a slab."""
        frames, text, sink = (t[0].to("meta") for t in (self._frames, self._text, self._sink))
        return Slab(-1, frames[0], frames[1], text[0], text[1], sink)

    def release(self, slab: Slab) -> None:
        """Return a slab. The caller must keep no view of it."""
        if slab.index in self._free:
            raise RuntimeError(f"slab {slab.index} released twice")
        self._free.append(slab.index)


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
    """Host memory for sessions: one arena of a fixed size, page-locked where a GPU copies.

    Suspended sessions take pieces of its first `limit_bytes`, first fit. Offloaded sessions take cells of one
    size behind them, so that neither kind can use up or fragment the other's memory. Not thread-safe: the
    engine's thread owns it.
    """

    def __init__(self, limit_bytes: int, pinned: bool, cells: int = 0, cell_bytes: int = 0) -> None:
        """Allocate page-locked memory now, because that takes seconds; other memory at the first use.

        Raises `HostMemoryUnavailableError`.
        """
        self.cells, self.cell_bytes = cells, aligned(cell_bytes)
        self._cells_from = aligned(limit_bytes)
        self._free_cells = [self._cells_from + place * self.cell_bytes for place in range(cells)]
        self.limit_bytes = limit_bytes
        self._pinned = pinned
        self._arena: Tensor | None = None
        self._free: list[Extent] = [Extent(0, limit_bytes)] if limit_bytes else []
        if (pinned and limit_bytes) or cells:
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

    @property
    def free_cells(self) -> int:
        """Number of cells that hold no state."""
        return len(self._free_cells)

    def is_cell(self, extent: Extent) -> bool:
        """Whether this is a cell."""
        return bool(self.cells) and extent.start >= self._cells_from

    @property
    def cell_bytes_used(self) -> int:
        """Bytes of the cells in use."""
        return (self.cells - self.free_cells) * self.cell_bytes

    def take_cell(self) -> Extent:
        """Allocate a cell. Raises `HostPoolFullError`; then nothing has changed."""
        if not self._free_cells:
            raise HostPoolFullError(self.cell_bytes, 0, self.cells * self.cell_bytes, 0)
        return Extent(self._free_cells.pop(), self.cell_bytes)

    def give_back(self, extent: Extent) -> None:
        """Free a piece or a cell. Its tensors are overwritten later."""
        if self.is_cell(extent):
            if extent.start in self._free_cells:
                raise RuntimeError(f"host pool: {extent} was given back twice")
            self._free_cells.append(extent.start)
            return
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
        """Free what lies behind the first `size` bytes of a piece. Returns the rest of the piece. A cell
        stays whole."""
        size = aligned(max(size, 1))
        if size >= extent.size or self.is_cell(extent):
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
            self._arena = torch.empty(self._arena_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        except RuntimeError as error:
            raise HostMemoryUnavailableError(self._arena_bytes, str(error)) from error
        return self._arena

    @property
    def _arena_bytes(self) -> int:
        if not self.cells:
            return self.limit_bytes
        return self._cells_from + self.cells * self.cell_bytes


def size_of(tensors: dict[str, Tensor]) -> int:
    """Bytes that tensors take in a pool."""
    return sum(aligned(t.numel() * t.element_size()) for t in tensors.values())

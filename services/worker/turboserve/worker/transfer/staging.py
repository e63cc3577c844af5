"""Copies between a piece of a state and host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turboserve.worker.transfer.link import PIECE_BYTES


class Staging:
    """Copies pieces of at most `PIECE_BYTES`. Those of a GPU pass through pinned memory, from and to which it
    copies at the full rate of its bus."""

    def __init__(self) -> None:
        self._pinned: Tensor | None = None

    def gather(self, piece: Sequence[Tensor], room: Tensor) -> None:
        """Copy a piece to host memory of its size."""
        staged = self._staged(piece, room)
        for part, place in zip(piece, _places(piece, staged), strict=True):
            place.copy_(part, non_blocking=staged is not room)
        if staged is not room:
            torch.cuda.current_stream(_device(piece)).synchronize()
            room.copy_(staged)

    def scatter(self, room: Tensor, piece: Sequence[Tensor]) -> None:
        """Copy host memory to a piece of its size."""
        staged = self._staged(piece, room)
        if staged is not room:
            staged.copy_(room)
        for part, place in zip(piece, _places(piece, staged), strict=True):
            part.copy_(place, non_blocking=staged is not room)
        if staged is not room:
            torch.cuda.current_stream(_device(piece)).synchronize()

    def _staged(self, piece: Sequence[Tensor], room: Tensor) -> Tensor:
        """The memory that the piece is copied from or to: `room`, or as much pinned memory."""
        if _device(piece).type != "cuda":
            return room
        if self._pinned is None:
            self._pinned = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        return self._pinned[: room.numel()]


def _device(piece: Sequence[Tensor]) -> torch.device:
    """The device of a piece. A part in host memory, beside parts of a GPU, is copied there and back."""
    return next((part.device for part in piece if part.device.type == "cuda"), torch.device("cpu"))


def _places(piece: Sequence[Tensor], room: Tensor) -> Sequence[Tensor]:
    return torch.split(room, [part.numel() for part in piece])

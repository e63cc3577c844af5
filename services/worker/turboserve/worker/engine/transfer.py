"""Transfer of one session's state to the host or back, piece by piece, while others compute."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from enum import Enum

import torch
from torch import Tensor

from turboserve.worker.engine.hostpool import Extent
from turboserve.worker.engine.snapshot import Snapshot
from turboserve.worker.engine.streams import DEVICE_LOST

PIECE_BYTES = 64 << 20
"""Largest piece, bytes. A transfer can be given up between two pieces: about 3 ms over PCIe."""


class TransferDirection(Enum):
    """Direction of a state transfer."""

    LEAVING = "leaving"
    """To the host; the session is then suspended."""
    ARRIVING = "arriving"
    """To a slab; the session then continues."""


class Transfer:
    """A job of the transfer executor."""

    def __init__(
        self,
        session: str,
        way: TransferDirection,
        snapshot: Snapshot,
        extent: Extent | None,
        targets: Mapping[str, Tensor],
        sources: Mapping[str, Tensor],
    ) -> None:
        """Split the copies into pieces.

        `snapshot`: the state that is, or will be, on the host. `extent`: its place, if in the pool. Tensors
        of one name have one shape and type.
        """
        self.session = session
        self.way = way
        self.snapshot = snapshot
        self.extent = extent
        self.error: Exception | None = None
        """The error of a failed transfer, once it is done."""
        self.given_up = False
        self._copies = [piece for name, target in targets.items() for piece in pieces(target, sources[name])]
        self._lock = threading.Lock()
        """Held while a piece is copied."""

    @torch.inference_mode()
    def run(self) -> None:
        """See `Job.run`."""
        try:
            for target, source in self._copies:
                with self._lock:
                    if self.given_up:
                        break
                    target.copy_(source, non_blocking=True)
                    if target.is_cuda or source.is_cuda:
                        torch.cuda.current_stream().synchronize()
        except DEVICE_LOST:
            raise
        except Exception as error:
            self.error = error
        self._copies = []

    def give_up(self) -> None:
        """Copy nothing more. Returns when no copy is in progress, so that both ends may be reused."""
        with self._lock:
            self.given_up = True


def pieces(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split both tensors alike into contiguous pieces of at most `PIECE_BYTES`, where their dimensions allow.

    A device copies a non-contiguous tensor through a temporary copy, for which no memory is reserved.
    """
    size = target.numel() * target.element_size()
    whole = target.is_contiguous() and source.is_contiguous() and size <= PIECE_BYTES
    if whole or target.dim() == 0 or (target.dim() == 1 and target.is_contiguous()):
        if size:
            yield target, source
        return
    for part, of in zip(target.unbind(0), source.unbind(0), strict=True):
        yield from pieces(part, of)

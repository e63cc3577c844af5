"""The transfer of a session's state between its slab and host memory, in pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from enum import Enum

import torch
from torch import Tensor

from turboserve.worker.engine.layer_arrival import LayerArrival
from turboserve.worker.engine.memory import Extent
from turboserve.worker.engine.snapshot import DECODER, Snapshot
from turboserve.worker.engine.streams import DEVICE_LOST

LAYERED = ("keys", "values", "sink_keys", "text_keys", "text_values")
"""Tensors [layers, …] of a snapshot: a forward needs layer i of them when it computes layer i."""
PIECE_BYTES = 64 << 20
"""Largest piece, bytes. A transfer can be given up between two pieces: about 3 ms over PCIe."""


class TransferDirection(Enum):
    """Direction of a state transfer."""

    LEAVING = "leaving"
    """To the host; the session is then suspended."""
    ARRIVING = "arriving"
    """To a slab; the session then continues."""


class TransferPurpose(Enum):
    """What becomes of the session after a state transfer."""

    SUSPENSION = "suspension"
    """It leaves its slab and is suspended, or arrives from suspension."""
    RESIDENCY = "residency"
    """It leaves its slab for another active session, or returns. It stays active."""
    STORAGE = "storage"
    """It is outside its slab, and its state goes from its cell to the memory of suspended sessions."""


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
        purpose: TransferPurpose = TransferPurpose.SUSPENSION,
        arrival: LayerArrival | None = None,
    ) -> None:
        """Split the copies into pieces.

        `snapshot`: the state that is, or will be, on the host. `extent`: its place, if in the pool. Tensors
        of one name have one shape and type. `arrival`: gets the layers, which are copied in order; what
        belongs to no layer is copied first, except the decoder's cache, which comes last.
        """
        self.purpose = purpose
        self.began_s = 0.0
        """When it was submitted for `RESIDENCY`, monotonic seconds on the engine's clock."""
        self.arrival = arrival
        self.on_begun: Callable[[], None] | None = None
        """Called on the executor's thread when the first layer of `arrival` has arrived; must not block."""
        self.session = session
        self.way = way
        self.snapshot = snapshot
        self.extent = extent
        self.error: Exception | None = None
        """The error of a failed transfer, once it is done."""
        self.given_up = False
        self._copies = list(_ordered(targets, sources, arrival is not None))
        self._lock = threading.Lock()
        """Held while a piece is copied."""

    @torch.inference_mode()
    def run(self) -> None:
        """See `Job.run`."""
        ended: BaseException | None = None
        try:
            for layer, copies in self._copies:
                if not self._copy(copies):
                    break
                if layer is not None and self.arrival is not None:
                    self.arrival.arrived(layer)
                    if layer == 0 and self.on_begun is not None:
                        self.on_begun()
        except DEVICE_LOST as error:
            ended = error
            raise
        except Exception as error:
            ended = self.error = error
        finally:
            if self.arrival is not None:
                self.arrival.end(ended)
        self._copies = []

    def _copy(self, copies: list[tuple[Tensor, Tensor]]) -> bool:
        """Copy these pieces. Returns whether all are copied: the transfer was not given up."""
        for target, source in copies:
            with self._lock:
                if self.given_up:
                    return False
                target.copy_(source, non_blocking=True)
                if target.is_cuda or source.is_cuda:
                    torch.cuda.current_stream().synchronize()
        return True

    def give_up(self) -> None:
        """Copy nothing more. Returns when no copy is in progress, so that both ends may be reused."""
        with self._lock:
            self.given_up = True


def _ordered(
    targets: Mapping[str, Tensor], sources: Mapping[str, Tensor], layered: bool
) -> Iterator[tuple[int | None, list[tuple[Tensor, Tensor]]]]:
    """The copies in their order, each group with the layer that has arrived after it."""
    if not layered:
        yield None, [piece for name, target in targets.items() for piece in pieces(target, sources[name])]
        return
    whole = [name for name in targets if name not in LAYERED]
    last = [name for name in whole if name.startswith(DECODER)]
    yield None, [p for name in whole if name not in last for p in pieces(targets[name], sources[name])]
    for layer in range(targets["keys"].shape[0]):
        parts = [(targets[name][layer], sources[name][layer]) for name in LAYERED if name in targets]
        yield layer, [piece for target, source in parts for piece in pieces(target, source)]
    yield None, [piece for name in last for piece in pieces(targets[name], sources[name])]


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

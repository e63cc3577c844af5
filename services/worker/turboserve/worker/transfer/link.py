"""The one interface of all backends, and the memory that they transfer."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from turboserve.worker.transfer.deadline import Deadline

PIECE_BYTES = 8 << 20
"""Bytes in flight at once. After each piece the deadline and an abort are checked."""
PROGRESS_S = 2.0
"""Longest time of one piece, seconds. A slower peer counts as dead or stopped."""


@dataclass(frozen=True)
class LocalPages:
    """Pages on this worker: the parts of each as flat bytes, uint8 [n], on one device."""

    pages: Sequence[Sequence[Tensor]]
    arrived: Callable[[int], object] = field(default=lambda size: None)
    """Called, where the link can, with the number of bytes that have arrived so far."""

    def parts(self, page_range: range) -> list[Tensor]:
        """The non-empty parts of these pages, in order."""
        return [part for index in page_range for part in self.pages[index] if part.numel()]

    def size(self, page_range: range) -> int:
        return sum(part.numel() for part in self.parts(page_range))


@dataclass(frozen=True)
class RemotePages:
    """Pages on the other worker, with its description of them (`Link.offer`)."""

    offer: Mapping[str, Any] = field(default_factory=dict)


class Link(ABC):
    """A connection between this worker and one other, in one direction, for one transfer at a time.

    Links are created on demand and kept for the next session between the two workers. A link that has raised
    an error is closed and never used again. All calls block and run on a thread of the transfer; `close` may
    be called on any thread and at any time.
    """

    kind: ClassVar[str]
    """The backend's name: gloo, nccl, nixl, shm."""

    def __init__(self, name: str) -> None:
        self.name = name
        """Name of the link at both ends."""
        self.closed = False

    def holds(self, size: int) -> bool:
        """Whether a transfer of so many bytes ends at the source before the target takes any."""
        return False

    def offer(self, pages: LocalPages, page_range: range, deadline: Deadline) -> dict[str, Any]:
        """At the source: prepare the pages. Returns what the target needs to access them, as JSON."""
        return {}

    @abstractmethod
    def transfer(
        self,
        session: str,
        source: LocalPages | RemotePages,
        target: LocalPages | RemotePages,
        page_range: range,
        deadline: Deadline,
    ) -> int:
        """Transfer pages `page_range` of a session. Returns the number of bytes.

        Both workers call it, each with its own `LocalPages` and `RemotePages` for the other's. Raises
        `TransferError`: `DeadlineExceededError`, `TransferAbortedError`, `PeerLostError`,
        `TruncatedStateError` or `TransferBackendError`. Then the link is closed, nothing is written to the
        target's memory any more, and neither side holds anything for the transfer.
        """

    def settle(self) -> None:  # noqa: B027 - most backends hold nothing.
        """At the source: release the last offer, because the target has taken it."""

    def release(self) -> None:  # noqa: B027 - most backends keep nothing large.
        """Release memory until the next transfer, because the link becomes idle."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Safe to repeat."""


def let_go(error: BaseException) -> None:
    """Clear the frames of failed calls: an error that is kept must keep no connection open."""
    traceback.clear_frames(error.__traceback__)
    if error.__context__ is not None:
        let_go(error.__context__)


def pieces(parts: Sequence[Tensor], size: int = PIECE_BYTES) -> Iterator[list[Tensor]]:
    """Split the parts, in order, into lists of at most `size` bytes each. Both ends split alike."""
    piece: list[Tensor] = []
    room = size
    for part in parts:
        at = 0
        while at < part.numel():
            taken = min(room, part.numel() - at)
            piece.append(part[at : at + taken])
            at += taken
            room -= taken
            if room == 0:
                yield piece
                piece, room = [], size
    if piece:
        yield piece

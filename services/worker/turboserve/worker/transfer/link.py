"""The one interface of all backends, and the memory they move."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from turboserve.worker.transfer.deadline import Deadline

PIECE_BYTES = 8 << 20
"""What is in flight at once: after each piece the deadline and an abort are looked at."""
PROGRESS_S = 2.0
"""A piece that takes longer than this has met a peer that is dead or stopped."""


@dataclass(frozen=True)
class LocalPages:
    """Pages on this worker: of each, its parts as flat bytes, uint8 [n], on one device."""

    pages: Sequence[Sequence[Tensor]]

    def parts(self, page_range: range) -> list[Tensor]:
        """Parts of these pages that have bytes, in order."""
        return [part for index in page_range for part in self.pages[index] if part.numel()]

    def size(self, page_range: range) -> int:
        return sum(part.numel() for part in self.parts(page_range))


@dataclass(frozen=True)
class RemotePages:
    """Pages on the other worker, with what it said of them (`Link.offer`)."""

    offer: Mapping[str, Any] = field(default_factory=dict)


class Link(ABC):
    """A way between this worker and one other, in one direction, for one transfer at a time.

    Made on demand and kept warm for the next session between the two. A link that has raised is closed and
    never used again. All calls block and are made on a thread of the transfer's own; `close` may be called on
    any thread and at any time.
    """

    kind: ClassVar[str]
    """The backend's name: gloo, nccl, nixl, shm."""

    def __init__(self, name: str) -> None:
        self.name = name
        """Names the link at both ends."""
        self.closed = False

    def offer(self, pages: LocalPages, page_range: range, deadline: Deadline) -> dict[str, Any]:
        """At the source: make pages ready; what the target needs to know to get at them, as JSON."""
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
        """Move pages `page_range` of a session; returns bytes moved. Both workers call it, each with its own
        `LocalPages` and `RemotePages` for the other's.

        Raises `TransferError`: `DeadlineExceededError`, `TransferAbortedError`, `PeerLostError`,
        `TruncatedStateError` or `TransferBackendError`. Then the link is closed, nothing is written to the
        target's memory any more, and neither side holds anything for the transfer.
        """

    def settle(self) -> None:  # noqa: B027 - most backends hold nothing.
        """At the source: the target has taken what was last offered."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Safe to repeat."""


def let_go(error: BaseException) -> None:
    """Clear what the calls that failed hold: an error that somebody keeps must keep no connection open."""
    traceback.clear_frames(error.__traceback__)
    if error.__context__ is not None:
        let_go(error.__context__)


def pieces(parts: Sequence[Tensor], size: int = PIECE_BYTES) -> Iterator[list[Tensor]]:
    """The parts in order, as lists of at most `size` bytes together. Both ends cut alike."""
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

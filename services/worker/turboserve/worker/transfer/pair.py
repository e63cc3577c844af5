"""torch.distributed between two workers: a process group of two, created on demand.

Both workers create the process group directly on their own store (`rendezvous`). `gloo` transfers host memory
over TCP, `nccl` device memory. A peer that dies or stops is noticed within `PROGRESS_S`.

The first peer to reach the library's listener may impersonate the other worker. Both ends therefore first
exchange a MAC over the new link. No state is sent to or accepted from a connection that did not prove the
migration's key.
"""

from __future__ import annotations

import hmac
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import (
    AuthenticationError,
    DeadlineExceededError,
    PeerLostError,
    TransferError,
)
from turboserve.worker.transfer.handshake import link_proof
from turboserve.worker.transfer.link import (
    PIECE_BYTES,
    PROGRESS_S,
    Link,
    LocalPages,
    RemotePages,
    let_go,
    pieces,
)
from turboserve.worker.transfer.process_groups import first_line, gloo_options, time_limit

SOURCE, TARGET = 0, 1
"""Ranks of the two ends."""
ROLES = ("source", "target")
DIRECT_BYTES = 256 << 10
"""Smallest contiguous piece that is sent without a bounce buffer, bytes."""
AT_ONCE_S = 0.001


@dataclass(frozen=True)
class LinkEndpoints:
    """Both ends of a link that is being created."""

    key: bytes
    """Key of the MACs by which the ends recognize each other, 32 bytes."""
    host: str
    """Address at which the library listens on this worker."""
    peers: Sequence[str]
    """Addresses from which the other end may connect."""


@dataclass(frozen=True, eq=False)
class _Flight:
    """A piece that is being transferred."""

    work: Any
    """The library's operation. The operation keeps the connection open as long as it is referenced."""
    data: Tensor
    piece: list[Tensor]


class PairLink(Link):
    """Common part of both backends: splits pages into pieces. The receiver keeps up to two in flight."""

    def __init__(self, name: str, store: HashStore, rank: int, device: torch.device) -> None:
        super().__init__(name)
        self.device = device
        self._store: HashStore | None = store
        self._rank = rank
        self._group: Any = None
        self._bounce = [torch.empty(0, dtype=torch.uint8, device=device)] * 2
        self._flights: deque[_Flight] = deque()
        """The only references to pieces in flight, so that an error's frames hold none."""

    def transfer(
        self,
        session: str,
        source: LocalPages | RemotePages,
        target: LocalPages | RemotePages,
        page_range: range,
        deadline: Deadline,
    ) -> int:
        """See `Link.transfer`."""
        try:
            if isinstance(source, LocalPages):
                return self._send(source.parts(page_range), deadline)
            assert isinstance(target, LocalPages)
            return self._receive(target.parts(page_range), deadline, target.arrived)
        except BaseException as error:
            self._drop_in_flight()
            self.close()
            let_go(error)
            if isinstance(error, RuntimeError):
                raise _named(error) from None
            raise

    def recognize(self, key: bytes, seconds: float) -> None:
        """Prove the key to the other end and verify its proof, over the link itself.

        Raises `AuthenticationError`, `PeerLostError` or `DeadlineExceededError`; the link is then closed.
        """
        mine, theirs = (link_proof(key, self.name, ROLES[rank]) for rank in (self._rank, 1 - self._rank))
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
        received = torch.zeros(len(theirs), dtype=torch.uint8, device=self.device)
        deadline = Deadline(seconds)
        try:
            # The ends take turns, as in a transfer: two operations at once would need two NCCL connections.
            for rank in (SOURCE, TARGET):
                group, data = self._live(deadline), sent if rank == self._rank else received
                act = group.send if rank == self._rank else group.recv
                self._flights.append(_Flight(act([data], 1 - self._rank, 0), data, []))
                self._await_copies(deadline, left=0)
            if not hmac.compare_digest(bytes(received.cpu().tolist()), theirs):
                raise AuthenticationError(f"link {self.name}: its other end is not the peer")
        except BaseException as error:
            self._drop_in_flight()
            self.close()
            let_go(error)
            if isinstance(error, RuntimeError):
                raise _named(error) from None
            raise

    def close(self) -> None:
        """See `Link.close`. A transfer in flight ends with its current piece."""
        self.closed = True
        self._group = self._store = None

    def _drop_in_flight(self) -> None:
        """Drop everything in flight: nothing writes to the pieces' memory after that."""
        self._flights.clear()

    def _send(self, parts: list[Tensor], deadline: Deadline) -> int:
        sent = 0
        for number, piece in enumerate(pieces(parts)):
            data = self._gather(piece, self._room(number, piece))
            self._await_copies(deadline, left=0)
            work = self._live(deadline).send([data], 1 - self._rank, 0)
            self._flights.append(_Flight(work, data, piece))
            sent += data.numel()
        self._await_copies(deadline, left=0)
        return sent

    def _receive(self, parts: list[Tensor], deadline: Deadline, arrived: Callable[[int], object]) -> int:
        taken = 0

        def scatter(left: int) -> None:
            nonlocal taken
            for flight in self._await_copies(deadline, left):
                self._scatter(flight.data, flight.piece)
                taken += flight.data.numel()
                arrived(taken)

        for number, piece in enumerate(pieces(parts)):
            data = self._receive_memory(piece, self._room(number, piece))
            work = self._live(deadline).recv([data], 1 - self._rank, 0)
            self._flights.append(_Flight(work, data, piece))
            scatter(left=1)
        scatter(left=0)
        return taken

    def _await_copies(self, deadline: Deadline, left: int) -> list[_Flight]:
        """Wait until at most `left` pieces are in flight. Returns the completed pieces."""
        landed = []
        while len(self._flights) > left:
            self._wait(self._flights[0].work, deadline)
            landed.append(self._flights.popleft())
        return landed

    def _live(self, deadline: Deadline) -> Any:
        deadline.left()
        if self._group is None:
            raise PeerLostError("the link is closed")
        return self._group

    @abstractmethod
    def _wait(self, work: Any, deadline: Deadline) -> None:
        """Wait until the piece is transferred. Raises the errors of `deadline.left` and of the library."""

    def _direct(self, piece: list[Tensor]) -> bool:
        alone = len(piece) == 1 and piece[0].numel() >= DIRECT_BYTES
        return alone and piece[0].device.type == self.device.type

    def _room(self, number: int, piece: list[Tensor]) -> Tensor:
        """One of the two bounce buffers, enlarged to the piece."""
        size = 0 if self._direct(piece) else sum(part.numel() for part in piece)
        if self._bounce[number % 2].numel() < size:
            room = min(PIECE_BYTES, 1 << (size - 1).bit_length())
            # A GPU copies from and to pinned memory at the full rate of its bus.
            pinned = self.device.type == "cpu" and any(part.is_cuda for part in piece)
            self._bounce[number % 2] = torch.empty(
                room, dtype=torch.uint8, device=self.device, pin_memory=pinned
            )
        return self._bounce[number % 2][:size]

    def _gather(self, piece: list[Tensor], room: Tensor) -> Tensor:
        if self._direct(piece):
            return piece[0]
        at = 0
        for part in piece:
            room[at : at + part.numel()].copy_(part)
            at += part.numel()
        return room

    def _receive_memory(self, piece: list[Tensor], room: Tensor) -> Tensor:
        return piece[0] if self._direct(piece) else room

    def _scatter(self, data: Tensor, piece: list[Tensor]) -> None:
        if self._direct(piece):
            return
        at = 0
        for part in piece:
            part.copy_(data[at : at + part.numel()])
            at += part.numel()


class GlooLink(PairLink):
    """Transfers host memory over TCP; device memory passes through host memory."""

    kind = "gloo"

    def __init__(self, name: str, store: HashStore, rank: int, ends: LinkEndpoints, seconds: float) -> None:
        """Connect and prove the key. Blocks until the other side does the same.

        Raises `AuthenticationError`, and `PeerLostError`, also if the other side does not connect within
        `seconds`.
        """
        super().__init__(name, store, rank, torch.device("cpu"))
        try:
            with gloo_options(ends.host, ends.peers, seconds) as options:
                self._group = dist.ProcessGroupGloo(store, rank, 2, options)
                self.recognize(ends.key, seconds)
        except RuntimeError as error:
            self.close()
            let_go(error)
            raise PeerLostError(f"gloo: {first_line(error)}") from None

    def _wait(self, work: Any, deadline: Deadline) -> None:
        work.wait(time_limit(deadline.left(PROGRESS_S)))

    def _drop_in_flight(self) -> None:
        # Dropping an operation does not end it. A wait for it that times out closes the pair.
        for flight in self._flights:
            with suppress(RuntimeError):
                flight.work.wait(time_limit(AT_ONCE_S))
        super()._drop_in_flight()


def _named(error: RuntimeError) -> TransferError:
    """Convert torch's `RuntimeError`, the only class that torch raises, to a `TransferError`."""
    text = first_line(error)
    late = "imed out" in text or "timeout" in text
    return DeadlineExceededError(text) if late else PeerLostError(text)

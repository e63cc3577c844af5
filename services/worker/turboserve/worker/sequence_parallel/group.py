"""A torch.distributed group of two workers of one host, created before any loan.

Every exchange is one all-to-all of bytes with a deadline. A worker that dies is noticed at once, a frozen one
at the deadline. An exchange that fails closes the group: another group needs another store.

`gloo` exchanges host memory over the loopback interface. `nccl` exchanges device memory; it needs one GPU for
each worker.
"""

from __future__ import annotations

import hmac
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from turboserve.worker.engine.errors import PartnerLostError
from turboserve.worker.transfer.handshake import link_proof
from turboserve.worker.transfer.process_groups import first_line, gloo_options, time_limit

LOOPBACK = "127.0.0.1"
ROLES = ("home", "donor")
"""Names of the ranks in the proof of the key. Either worker may be home and donor later."""


class Group(ABC):
    """See `sequence_parallel.Exchange`. For one thread at a time."""

    kind: str

    def __init__(self, rank: int, device: torch.device, limit_s: float) -> None:
        """`limit_s`: longest time of one exchange, seconds."""
        self.rank, self.limit_s = rank, limit_s
        self.sent_bytes = 0
        """Bytes that this end has sent."""
        self.exchanges = 0
        self._device = device
        self._rest_s: float | None = None
        """What is left of the time of a forward. None: each exchange has its own limit."""
        self._group: Any = None
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device)] * 2
        """Memory to send from and to receive to, enlarged to the largest exchange."""

    @property
    def closed(self) -> bool:
        """Whether no further exchange is possible."""
        return self._group is None

    def __call__(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Exchange tensors. Raises `PartnerLostError`; the group is then closed."""
        # The loop's thread may close the group at any moment.
        group, began_s = self._group, time.monotonic()
        if group is None:
            raise PartnerLostError("the group is closed")
        if self._wait_s <= 0:
            self.close()
            raise PartnerLostError(
                f"{self.kind}: the exchanges of a forward take more than {self.limit_s:g} s"
            )
        out, into = (self._room(place, parts) for place, parts in enumerate((sent, received)))
        at = 0
        for part in sent:
            size = part.numel() * part.element_size()
            out[at : at + size].view(part.dtype).view(part.shape).copy_(part)
            at += size
        try:
            counts = self._counts(into), self._counts(out)
            options = dist.AllToAllOptions()
            options.timeout = time_limit(self._wait_s)
            self._wait(group.alltoall_base(into, out, *counts, options))
        except RuntimeError as error:
            self.close()
            raise PartnerLostError(f"{self.kind}: {first_line(error)}") from None
        if self._rest_s is not None:
            self._rest_s -= time.monotonic() - began_s
        self.sent_bytes += out.numel()
        self.exchanges += 1
        at = 0
        for part in received:
            size = part.numel() * part.element_size()
            part.copy_(into[at : at + size].view(part.dtype).view(part.shape))
            at += size

    @contextmanager
    def one_forward(self) -> Iterator[None]:
        """See `PeerGroup.one_forward`."""
        self._rest_s = self.limit_s
        try:
            yield
        finally:
            self._rest_s = None

    @property
    def _wait_s(self) -> float:
        """Longest time of the next exchange, seconds."""
        return self.limit_s if self._rest_s is None else self._rest_s

    def recognize(self, key: bytes, name: str) -> None:
        """Prove the key to the other end and verify its proof. Raises `PartnerLostError`."""
        mine, theirs = (link_proof(key, name, ROLES[rank]) for rank in (self.rank, 1 - self.rank))
        proof = torch.zeros(len(theirs), dtype=torch.uint8, device=self._device)
        self([torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self._device)], [proof])
        if not hmac.compare_digest(bytes(proof.tolist()), theirs):
            self.close()
            raise PartnerLostError(f"group {name}: its other end is not the partner")

    def close(self) -> None:
        """Close the group. The other worker notices at its next exchange."""
        self._group = None

    def _counts(self, buffer: Tensor) -> list[int]:
        """Bytes of an all-to-all for each rank: all for the other, none for this one."""
        return [0, buffer.numel()] if self.rank == 0 else [buffer.numel(), 0]

    @abstractmethod
    def _wait(self, work: Any) -> None:
        """Wait for an exchange until the deadline. Raises `RuntimeError`."""

    def _room(self, place: int, parts: Sequence[Tensor]) -> Tensor:
        size = sum(part.numel() * part.element_size() for part in parts)
        if self._buffers[place].numel() < size:
            room = 1 << (size - 1).bit_length()
            self._buffers[place] = torch.empty(room, dtype=torch.uint8, device=self._device)
        return self._buffers[place][:size]


class GlooGroup(Group):
    """Two workers whose states are in host memory."""

    kind = "gloo"

    def __init__(
        self, store: Store, rank: int, key: bytes, name: str, connect_s: float, limit_s: float
    ) -> None:
        """Connect to the other worker and prove the key. Blocks until the other worker does the same.

        Raises `PartnerLostError`, also if it does not within `connect_s`.
        """
        super().__init__(rank, torch.device("cpu"), limit_s)
        try:
            with gloo_options(LOOPBACK, [LOOPBACK], connect_s) as options:
                self._group = dist.ProcessGroupGloo(store, rank, 2, options)
                self.recognize(key, name)
        except RuntimeError as error:
            self.close()
            raise PartnerLostError(f"gloo: {first_line(error)}") from None

    def _wait(self, work: Any) -> None:
        work.wait(time_limit(self._wait_s))


class NcclGroup(Group):
    """Two workers with a GPU each. The host waits for each exchange: a stream that waits for a dead worker
    would never end."""

    kind = "nccl"

    def __init__(
        self,
        store: Store,
        rank: int,
        key: bytes,
        name: str,
        connect_s: float,
        limit_s: float,
        device: torch.device,
    ) -> None:
        """See `GlooGroup`."""
        super().__init__(rank, device, connect_s)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = time_limit(connect_s)
        try:
            self._group = dist.ProcessGroupNCCL(store, rank, 2, options)
        except RuntimeError as error:
            raise PartnerLostError(f"nccl: {first_line(error)}") from None
        # The first exchange creates the communicator.
        self.recognize(key, name)
        self.limit_s = limit_s

    def close(self) -> None:
        """See `Group.close`. An exchange under way is aborted."""
        group = self._group
        super().close()
        if group is not None:
            group.abort()

    def _wait(self, work: Any) -> None:
        until = time.monotonic() + self._wait_s
        while not work.is_completed():
            if time.monotonic() >= until:
                raise RuntimeError(f"no exchange within {self._wait_s:g} s")
            time.sleep(0)
        work.wait()

"""Payloads of a connection over links of the transfer's backends, as states pass in a migration.

Frames stay on the connection. A payload over a link is announced by a frame, and has a deadline. It has no
MAC: the announcing frame, which has one, names the payload's SHA-256 digest. Shared memory needs neither. The
kernel gives it to processes of the same user only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import (
    DigestMismatchError,
    PeerLostError,
    TransferBackendError,
    TransferError,
)
from turboserve.worker.transfer.link import Link, LocalPages, RemotePages
from turboserve.worker.transfer.network import LinkTable

REST_S = 60.0
"""Time for which a backend that has failed is not used with that worker, seconds."""
UNVERIFIED = frozenset({"shm"})

T = TypeVar("T")


@dataclass(frozen=True)
class Announced:
    """What the receiver needs of a payload's transfer."""

    offer: Mapping[str, Any]
    digest: str
    """SHA-256 over the payloads, hexadecimal. Empty: the link is not verified."""
    left: LocalPages | None
    """What has still to be sent. None: the link holds everything."""


class PayloadLinks:
    """The two links of a connection, one in each direction. One payload at a time in each."""

    def __init__(self, table: LinkTable, sending: Link, receiving: Link) -> None:
        self._table, self.sending, self.receiving = table, sending, receiving
        self._offered: LocalPages | None = None
        """Memory of the last payload that was sent. A backend may read it until the next one."""
        self.failed: set[str] = set()
        """Backends that have failed at a payload, and not because the other worker is gone."""

    @property
    def kinds(self) -> str:
        """Names of the backends."""
        return "/".join(dict.fromkeys((self.sending.kind, self.receiving.kind)))

    def close(self) -> None:
        """Close both links. A transfer under way ends. Safe to repeat."""
        self.sending.close()
        self.receiving.close()
        self._offered = None

    def failed_elsewhere(self) -> None:
        """Note that the other worker has ended the connection because of a backend."""
        self.failed |= {self.sending.kind, self.receiving.kind}

    async def announce(self, payloads: Sequence[Tensor], deadline: Deadline) -> Announced:
        """Prepare the payloads. What the link holds is sent as well. Raises `TransferError`."""
        link, memory = self.sending, _memory(payloads)
        pages, size = range(len(memory.pages)), memory.size(range(len(memory.pages)))

        def prepare() -> Announced:
            # The other worker has asked or answered since: it has taken the last payload.
            if self._offered is not None:
                link.settle()
            self._offered = memory
            offer = link.offer(memory, pages, deadline)
            if link.closed:
                # By another thread, meanwhile: what the offer has opened is closed as well.
                raise PeerLostError("the link is closed")
            if not link.holds(size):
                return Announced(offer, _digest(link, memory, deadline), memory)
            link.transfer("payload", memory, RemotePages(), pages, deadline)
            return Announced(offer, _digest(link, memory, deadline), None)

        return await self._run(prepare, link, deadline)

    async def send(self, left: LocalPages, deadline: Deadline) -> None:
        """Send what is left of an announced payload. Raises `TransferError`."""
        link, pages = self.sending, range(len(left.pages))

        def transfer() -> int:
            return link.transfer("payload", left, RemotePages(), pages, deadline)

        await self._run(transfer, link, deadline)

    async def receive(
        self, offer: Mapping[str, Any], digest: str, into: Sequence[Tensor], deadline: Deadline
    ) -> None:
        """Receive announced payloads. Raises `TransferError`, also for other bytes than were sent.

        After an error or a cancellation, nothing is written to `into` any more.
        """
        link, memory = self.receiving, _memory(into)
        pages = range(len(memory.pages))

        def take() -> None:
            link.transfer("payload", RemotePages(offer), memory, pages, deadline)
            if (found := _digest(link, memory, deadline)) != digest:
                raise DigestMismatchError(found, digest)

        await self._run(take, link, deadline)

    async def _run(self, call: Callable[[], T], link: Link, deadline: Deadline) -> T:
        try:
            return await self._table.blocking(call, deadline, link)
        except PeerLostError:
            link.close()
            raise
        except BaseException as error:
            # A canceled transfer is one whose time has ended.
            self.failed.add(link.kind)
            link.close()
            if isinstance(error, TransferError) or not isinstance(error, Exception):
                raise
            # As where the system has no more memory or files.
            raise TransferBackendError(f"{link.kind}: {error!r}") from error


class BackendRests:
    """Backends that have failed with one worker. They are left out for `REST_S`. Pure."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until: dict[str, float] = {}

    def failed(self, backend: str) -> None:
        """Note that a link could not be made, or has failed."""
        self._until[backend] = self._now() + REST_S

    def usable(self, backends: Sequence[str]) -> tuple[str, ...]:
        """Return those of the backends that have not failed lately."""
        now = self._now()
        return tuple(name for name in backends if self._until.get(name, now) <= now)


def _memory(tensors: Sequence[Tensor]) -> LocalPages:
    """Tensors in host memory as pages of bytes. Contiguous ones are not copied."""
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return LocalPages([[each] for each in flat])


def _digest(link: Link, memory: LocalPages, deadline: Deadline) -> str:
    if link.kind in UNVERIFIED:
        return ""
    hasher = hashlib.sha256()
    for part in memory.parts(range(len(memory.pages))):
        deadline.left()
        hasher.update(part.numpy().data)
    return hasher.hexdigest()

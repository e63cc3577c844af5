"""How a worker reaches others: it listens, it connects, and it has links that move memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import torch

from turboserve.worker.transfer import shm
from turboserve.worker.transfer.channel import ByteReader, ByteWriter, Channel
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.frames import Hello, Welcome
from turboserve.worker.transfer.interface import Interface, confine_libraries
from turboserve.worker.transfer.link import Link
from turboserve.worker.transfer.links import Links
from turboserve.worker.transfer.source import listen

T = TypeVar("T")

Serve = Callable[[ByteReader, ByteWriter], Awaitable[None]]
"""Serves one connection, to its end."""


class LinkTable(Protocol):
    """The links of one worker (`links.Links`)."""

    model: str
    """Fingerprint of the model whose sessions move here."""

    @property
    def backends(self) -> Sequence[str]:
        """In order of preference."""
        ...

    def hello(self, source: str, limit_s: float) -> Hello:
        """What a target says once it is admitted. `source`: the address that its links are kept under;
        `limit_s`: how long it waits."""
        ...

    async def give(
        self, channel: Channel, hello: Hello, peer: str, key: bytes, quiesced: bool, deadline: Deadline
    ) -> Link:
        """At the source: choose a way to the target, tell it, and have it stand. Raises `TransferError`."""
        ...

    async def take(
        self, channel: Channel, welcome: Welcome, source: str, key: bytes, deadline: Deadline
    ) -> Link:
        """At the target: the other end of it. Raises `TransferError`."""
        ...

    def put_back(self, peer: str, link: Link, *, giving: bool) -> None:
        """Keep it for the next session between the two, unless it is closed."""
        ...

    async def blocking(self, call: Callable[[], T], deadline: Deadline, link: Link | None = None) -> T:
        """Have done what takes long. Cancelled, it first ends the call, so that no memory is in use
        afterwards."""
        ...

    def close(self) -> None:
        """Close what is idle; what is in use closes with its transfer."""
        ...


class TransferNetwork(Protocol):
    """What the two roles of a migration need of the machine."""

    @property
    def links(self) -> LinkTable: ...

    @property
    def machine(self) -> str:
        """See `LoadReport.host`."""
        ...

    async def listen(self, serve: Serve) -> str:
        """Serve connections from now on; the address for other workers. Raises `OSError`."""
        ...

    async def connect(self, host: str, port: int) -> tuple[ByteReader, ByteWriter]:
        """Raises `OSError`."""
        ...

    def close(self) -> None:
        """Listen no more."""
        ...


class SocketNetwork:
    """See `TransferNetwork`: TCP on one interface."""

    def __init__(
        self, interface: Interface, port: int, backends: Sequence[str], device: torch.device, model: str
    ) -> None:
        """`port`: 0 for any. `backends`, `model`: see `Links`."""
        self._interface, self._port = interface, port
        self.links = Links(backends, device, model, interface)
        self.machine = shm.machine()
        self._server: asyncio.Server | None = None

    async def listen(self, serve: Serve) -> str:
        """See `TransferNetwork.listen`."""
        confine_libraries(self._interface)
        host = self._interface.address
        self._server, port = await listen(serve, host, self._port)
        shown = f"[{host}]" if ":" in host else host
        return f"tcp://{shown}:{port}"

    async def connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See `TransferNetwork.connect`."""
        return await asyncio.open_connection(host, port)

    def close(self) -> None:
        """See `TransferNetwork.close`."""
        if self._server is not None:
            self._server.close()

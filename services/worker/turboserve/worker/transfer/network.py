"""The network of a worker's transfers: a listener, connections, and links that transfer memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol, TypeVar

import torch

from turboserve.host_port import host_port
from turboserve.worker.transfer import shm
from turboserve.worker.transfer.channel import ByteReader, ByteWriter, Channel
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.frames import Hello, Welcome
from turboserve.worker.transfer.interface import Interface, confine_libraries
from turboserve.worker.transfer.link import Link
from turboserve.worker.transfer.links import Links

T = TypeVar("T")

ACCEPTS_AT_ONCE = 16
WAITING = 128
Serve = Callable[[ByteReader, ByteWriter], Awaitable[None]]
"""Serves one connection until its end."""


class LinkTable(Protocol):
    """The links of one worker (`links.Links`)."""

    model: str
    """Fingerprint of the model whose sessions are transferred."""

    @property
    def backends(self) -> Sequence[str]:
        """Backends in order of preference."""
        ...

    def hello(self, source: str, limit_s: float, failed: Collection[str] = ()) -> Hello:
        """The frame that an admitted target sends. `source`: the address under which its links are kept;
        `limit_s`: time after which the target gives up; `failed`: backends that come last now."""
        ...

    async def give(
        self, channel: Channel, hello: Hello, peer: str, key: bytes, quiesced: bool, deadline: Deadline
    ) -> Link:
        """At the source: choose, announce and, if necessary, create a link to the target. Raises
        `TransferError`."""
        ...

    async def take(
        self, channel: Channel, welcome: Welcome, source: str, key: bytes, deadline: Deadline
    ) -> Link:
        """At the target: return the other end of the link. Raises `TransferError`."""
        ...

    def put_back(self, peer: str, link: Link, *, giving: bool) -> None:
        """Keep the link for the next session between the two workers, unless it is closed."""
        ...

    async def blocking(self, call: Callable[[], T], deadline: Deadline, link: Link | None = None) -> T:
        """Run a blocking call. A cancellation first ends the call, so that no memory is in use afterwards."""
        ...

    def close(self) -> None:
        """Close idle links. A link in use closes with its transfer."""
        ...


class TransferNetwork(Protocol):
    """What source and target need of the machine."""

    @property
    def links(self) -> LinkTable: ...

    @property
    def machine(self) -> str:
        """See `LoadReport.host`."""
        ...

    async def listen(self, serve: Serve) -> str:
        """Serve connections from now on. Returns the address for other workers. Raises `OSError`."""
        ...

    async def connect(self, host: str, port: int) -> tuple[ByteReader, ByteWriter]:
        """Connect to another worker. Raises `OSError`."""
        ...

    def close(self) -> None:
        """Stop listening."""
        ...


class SocketNetwork:
    """TCP on one interface. See `TransferNetwork`."""

    def __init__(
        self, interface: Interface, port: int, backends: Sequence[str], device: torch.device, model: str
    ) -> None:
        """`port`: 0 for any free port. `backends`, `model`: see `Links`. Confines UCX and NCCL, for the whole
        process, to the interface."""
        # Before any link: the libraries read the variables once, when they start.
        confine_libraries(interface)
        self._interface, self._port = interface, port
        self.links = Links(backends, device, model, interface)
        self.machine = shm.machine()
        self._server: asyncio.Server | None = None

    async def listen(self, serve: Serve) -> str:
        """See `TransferNetwork.listen`."""
        host = self._interface.address
        self._server, port = await listen(serve, host, self._port)
        return f"tcp://{host_port(host, port)}"

    async def connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See `TransferNetwork.connect`."""
        return await asyncio.open_connection(host, port)

    def close(self) -> None:
        """See `TransferNetwork.close`."""
        if self._server is not None:
            self._server.close()


async def listen(serve: Serve, host: str, port: int) -> tuple[asyncio.Server, int]:
    """Serve connections to this address. Returns the server and its port. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    # asyncio accepts up to `backlog` connections at once: a small number leaves the loop time for other work
    # during a flood.
    server = await asyncio.start_server(serve, sock=listener, backlog=ACCEPTS_AT_ONCE)
    # More connections wait in the kernel, but not so many that a target gives up before its turn.
    listener.listen(WAITING)
    return server, int(listener.getsockname()[1])

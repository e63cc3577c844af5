"""The network between simulated workers: connections with delays, and links that move memory.

Both roles of a migration run on it unmodified. It models TCP and the data plane's libraries: a process that
dies closes its connections, a frozen process sends nothing, and a connection may break at any message.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from typing import Any

from turboserve.simulation.runtime.device.fabric import Listener, TransferFabric
from turboserve.simulation.runtime.device.links import MemoryLinks
from turboserve.simulation.runtime.process import Process, current
from turboserve.worker.transfer.network import Serve

PORT = 4711


class Pipe:
    """One direction of a connection."""

    def __init__(
        self, fabric: TransferFabric, reader: asyncio.StreamReader, ends: tuple[str, str] = ("", "")
    ) -> None:
        """`ends`: names of the workers at both ends."""
        self.fabric, self.reader = fabric, reader
        self._ends = ends
        self.shutdown_connections: Callable[[], None] = lambda: None
        """Breaks both directions."""
        self.silent = False
        self._closed = self._unread = False
        self._free_at = 0.0

    def send(self, data: bytes) -> None:
        fabric = self.fabric
        if fabric.chance(fabric.faults.breaks):
            if fabric.chance(fabric.faults.silent):
                self.silent = True
            else:
                self.shutdown_connections()
        if not self.silent and not self._closed:
            self._later(lambda: self.reader.feed_data(data))

    def finish(self) -> None:
        """Send the end of the stream."""
        if not self._closed and not self.silent:
            self._closed = True
            self._later(self.reader.feed_eof)

    def reset(self) -> None:
        """Break the connection, as its reader sees it."""
        if not self._closed:
            self._closed = True
            if self.fabric.carries_at(self._ends) > self.fabric.loop.time():
                self._later(self._break)
            else:
                self._break()

    def _break(self) -> None:
        self.reader.set_exception(ConnectionResetError("the connection was reset"))

    def read_no_more(self) -> None:
        """Drop what is still on its way, because the reading side has closed its socket."""
        self._unread = True
        if not self.reader.at_eof() and self.reader.exception() is None:
            self.reader.feed_eof()

    def _later(self, arrive: Callable[[], None]) -> None:
        loop = self.fabric.loop
        delay = self.fabric.random.expovariate(1.0 / self.fabric.delay_s) if self.fabric.delay_s else 0.0
        # What is lost meanwhile is sent again.
        self._free_at = max(self._free_at, loop.time() + delay, self.fabric.carries_at(self._ends))
        loop.call_at(self._free_at, self._arrive, arrive, context=Context())

    def _arrive(self, arrive: Callable[[], None]) -> None:
        if not self._unread and self.reader.exception() is None:
            arrive()


class PipeWriter:
    """See `channel.ByteWriter`.

    Closing needs no living process: the kernel closes a dead process's sockets.
    """

    def __init__(self, pipe: Pipe, back: Pipe, process: Process, peer: str) -> None:
        self._pipe, self._back, self._process, self._peer = pipe, back, process, peer
        self._closed = False

    @property
    def transport(self) -> PipeWriter:
        return self

    def write(self, data: bytes) -> None:
        self._process.check_alive()
        if not self._closed:
            self._pipe.send(data)

    async def drain(self) -> None:
        error = self._back.reader.exception()
        if error is not None:
            raise error

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pipe.finish()
            self._back.read_no_more()

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            self._pipe.reset()

    async def wait_closed(self) -> None:
        return

    def get_extra_info(self, name: str) -> Any:
        return (self._peer, PORT) if name == "peername" else None


class MemoryNetwork:
    """One worker's end of the network. See `network.TransferNetwork`."""

    def __init__(self, fabric: TransferFabric, host: str, model: str) -> None:
        """`host` is the worker's name in the fabric; for `model`, see `LinkTable.model`."""
        self._fabric, self._host = fabric, host
        self.machine = host
        self.links = MemoryLinks(fabric, model)

    async def listen(self, serve: Serve) -> str:
        """See `TransferNetwork.listen`."""
        process = current() or self._fabric.loop.world
        self._fabric.listeners[self._host] = Listener(process, serve)
        return f"tcp://{self._host}:{PORT}"

    async def connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, PipeWriter]:
        """See `TransferNetwork.connect`."""
        return await open_connection(self._fabric, self._host, f"{host}:{port}", self._fabric.listeners, host)

    def close(self) -> None:
        """See `TransferNetwork.close`."""
        self._fabric.listeners.pop(self._host, None)


async def open_connection(
    fabric: TransferFabric, own: str, address: str, listeners: Mapping[str, Listener], host: str
) -> tuple[asyncio.StreamReader, PipeWriter]:
    """Connect the current process to the listener of this name. Raises `OSError`.

    `own`: name of this end for the other. `address`: the other's, for errors.
    """
    process = current() or fabric.loop.world
    ends = own, host
    await asyncio.sleep(max(fabric.delay_s, fabric.carries_at(ends) - fabric.loop.time()))
    there = listeners.get(host)
    if there is None or not there.process.alive:
        raise ConnectionRefusedError(f"{address} refuses")
    if fabric.chance(fabric.faults.breaks):
        if fabric.chance(fabric.faults.silent):
            await asyncio.sleep(math.inf)
        raise ConnectionResetError(f"{address} closed the connection")
    to_server, to_client = (Pipe(fabric, asyncio.StreamReader(loop=fabric.loop), ends) for _ in range(2))

    def shutdown_connections() -> None:
        to_server.reset()
        to_client.reset()

    to_server.shutdown_connections = to_client.shutdown_connections = shutdown_connections
    served = PipeWriter(to_client, to_server, there.process, own)
    fabric.loop.spawn(there.process, _served(there.serve(to_server.reader, served)), "transfer")
    return to_client.reader, PipeWriter(to_server, to_client, process, host)


async def _served(serving: Awaitable[None]) -> None:
    await serving

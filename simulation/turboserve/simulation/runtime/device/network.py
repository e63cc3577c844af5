"""The network between simulated workers: connections with delays, and links that move memory.

Both roles of a migration run on it unmodified. It models TCP and the data plane's libraries: a process that
dies hangs up, a frozen process sends nothing, and either may break at any message.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from dataclasses import dataclass
from random import Random

from turboserve.simulation.runtime.device.links import MemoryLinks, Wire
from turboserve.simulation.runtime.device.pipes import PORT, Pipe, PipeWriter
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.runtime.process import Process, current
from turboserve.worker.transfer.network import Serve


@dataclass
class FabricFaults:
    """Probabilities of faults. May be changed at any time."""

    breaks: float = 0.0
    """For each message between two workers: its connection breaks."""
    silent: float = 0.5
    """For each connection that breaks: neither side notices."""
    corrupts: float = 0.0
    """For each round of a copy: a byte arrives wrong."""
    stalls: float = 0.0
    """For each round of a copy: the memory transfer stalls."""


@dataclass(eq=False)
class _Listener:
    process: Process
    serve: Serve


class TransferFabric:
    """The data plane of all workers."""

    def __init__(
        self, loop: VirtualLoop, random: Random, delay_s: float = 0.001, bytes_per_s: float = 50_000.0
    ) -> None:
        """`delay_s` is a message's mean delay; `bytes_per_s` is the pace of a copy, in bytes that exist."""
        self.loop, self.random = loop, random
        self.delay_s, self.bytes_per_s = delay_s, bytes_per_s
        self.faults = FabricFaults()
        self.listeners: dict[str, _Listener] = {}
        self.wires: dict[str, Wire] = {}
        """Wires by the name of their link, while both ends are open."""
        self._links = 0

    def chance(self, of: float) -> bool:
        """Draw whether a fault of this probability occurs."""
        return of > 0 and self.random.random() < of

    def new_link(self) -> str:
        """Return a new unique name."""
        self._links += 1
        return f"lnk_{self._links}"


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
        self._fabric.listeners[self._host] = _Listener(process, serve)
        return f"tcp://{self._host}:{PORT}"

    async def connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, PipeWriter]:
        """See `TransferNetwork.connect`."""
        fabric = self._fabric
        process = current() or fabric.loop.world
        await asyncio.sleep(fabric.delay_s)
        there = fabric.listeners.get(host)
        if there is None or not there.process.alive:
            raise ConnectionRefusedError(f"{host}:{port} refuses")
        if fabric.chance(fabric.faults.breaks):
            if fabric.chance(fabric.faults.silent):
                await asyncio.sleep(math.inf)
            raise ConnectionResetError(f"{host}:{port} closed the connection")
        to_server, to_client = (Pipe(fabric, asyncio.StreamReader(loop=fabric.loop)) for _ in range(2))

        def shutdown_connections() -> None:
            to_server.reset()
            to_client.reset()

        to_server.shutdown_connections = to_client.shutdown_connections = shutdown_connections
        served = PipeWriter(to_client, to_server, there.process, self._host)
        fabric.loop.spawn(there.process, _served(there.serve(to_server.reader, served)), "transfer")
        return to_client.reader, PipeWriter(to_server, to_client, process, host)

    def close(self) -> None:
        """See `TransferNetwork.close`."""
        self._fabric.listeners.pop(self._host, None)


async def _served(serving: Awaitable[None]) -> None:
    await serving

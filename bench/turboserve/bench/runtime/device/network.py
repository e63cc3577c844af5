"""The network between simulated workers: connections whose bytes take their time, and links that move memory.

Both roles of a migration run on it unmodified. What it models is TCP and the data plane's libraries: a
process that dies hangs up, one that is frozen says nothing, and either may break at any message.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import torch

from turboserve.bench.runtime.loop import VirtualLoop
from turboserve.bench.runtime.process import Process, current
from turboserve.worker.transfer.channel import Channel
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import Aborted, NoBackend, PeerLost, ProtocolBroken, Truncated
from turboserve.worker.transfer.frames import Hello, Welcome
from turboserve.worker.transfer.link import PROGRESS_S, Link, Memory, Remote
from turboserve.worker.transfer.network import Serve

T = TypeVar("T")
BACKEND = "memory"
PORT = 4711


@dataclass
class FabricFaults:
    """Chances of what may go wrong; whoever simulates sets them, at any time."""

    breaks: float = 0.0
    """Of each message between two workers: that its connection breaks there."""
    silent: float = 0.5
    """Of a connection that breaks: that neither side is told."""
    corrupts: float = 0.0
    """Of each round of a copy: that a byte arrives wrong."""
    stalls: float = 0.0
    """Of each round of a copy: that memory stops moving."""


@dataclass(eq=False)
class _Listener:
    process: Process
    serve: Serve


class TransferFabric:
    """All workers' data plane."""

    def __init__(
        self, loop: VirtualLoop, random: Random, delay_s: float = 0.001, bytes_per_s: float = 50_000.0
    ) -> None:
        """`delay_s`: mean of a message's way. `bytes_per_s`: pace of a copy, in bytes that exist."""
        self.loop, self.random = loop, random
        self.delay_s, self.bytes_per_s = delay_s, bytes_per_s
        self.faults = FabricFaults()
        self.listeners: dict[str, _Listener] = {}
        self.wires: dict[str, _Wire] = {}
        """By the name of their link, as long as both ends are open."""
        self._links = 0

    def chance(self, of: float) -> bool:
        """Whether it happens this time."""
        return of > 0 and self.random.random() < of

    def new_link(self) -> str:
        """A name given once."""
        self._links += 1
        return f"lnk_{self._links}"


class _Pipe:
    """One direction of a connection."""

    def __init__(self, fabric: TransferFabric, reader: asyncio.StreamReader) -> None:
        self.fabric, self.reader = fabric, reader
        self.cut: Callable[[], None] = lambda: None
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
                self.cut()
        if not self.silent and not self._closed:
            self._later(lambda: self.reader.feed_data(data))

    def finish(self) -> None:
        """No more follows."""
        if not self._closed and not self.silent:
            self._closed = True
            self._later(self.reader.feed_eof)

    def reset(self) -> None:
        """The reader is told that the connection is lost."""
        if not self._closed:
            self._closed = True
            self.reader.set_exception(ConnectionResetError("the connection was reset"))

    def read_no_more(self) -> None:
        """The reading side has closed its socket: what is still on its way arrives nowhere."""
        self._unread = True
        if not self.reader.at_eof() and self.reader.exception() is None:
            self.reader.feed_eof()

    def _later(self, arrive: Callable[[], None]) -> None:
        loop = self.fabric.loop
        delay = self.fabric.random.expovariate(1.0 / self.fabric.delay_s) if self.fabric.delay_s else 0.0
        self._free_at = max(self._free_at, loop.time() + delay)
        loop.call_at(self._free_at, self._arrive, arrive, context=_outside())

    def _arrive(self, arrive: Callable[[], None]) -> None:
        if not self._unread and self.reader.exception() is None:
            arrive()


class _Writer:
    """See `channel.ByteWriter`. Closing is the kernel's, which closes a dead process's sockets."""

    def __init__(self, pipe: _Pipe, back: _Pipe, process: Process, peer: str) -> None:
        self._pipe, self._back, self._process, self._peer = pipe, back, process, peer
        self._closed = False

    @property
    def transport(self) -> _Writer:
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
    """One worker's end. See `network.TransferNetwork`."""

    def __init__(self, fabric: TransferFabric, host: str, model: str) -> None:
        """`host`: its name in the fabric. `model`: see `LinkTable.model`."""
        self._fabric, self._host = fabric, host
        self.machine = host
        self.links = MemoryLinks(fabric, model)

    async def listen(self, serve: Serve) -> str:
        """See `TransferNetwork.listen`."""
        process = current() or self._fabric.loop.world
        self._fabric.listeners[self._host] = _Listener(process, serve)
        return f"tcp://{self._host}:{PORT}"

    async def connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, _Writer]:
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
            raise ConnectionResetError(f"{host}:{port} hung up")
        to_server, to_client = (_Pipe(fabric, asyncio.StreamReader(loop=fabric.loop)) for _ in range(2))

        def cut() -> None:
            to_server.reset()
            to_client.reset()

        to_server.cut = to_client.cut = cut
        served = _Writer(to_client, to_server, there.process, self._host)
        fabric.loop.spawn(there.process, _served(there.serve(to_server.reader, served)), "transfer")
        return to_client.reader, _Writer(to_server, to_client, process, host)

    def close(self) -> None:
        """See `TransferNetwork.close`."""
        self._fabric.listeners.pop(self._host, None)


@dataclass(eq=False)
class _Wire:
    """Both ends of a link."""

    source: Process
    rounds: list[tuple[float, list[bytes]]] = field(default_factory=list)
    """What was sent and not taken: when it is there, and its pages."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class MemoryLink(Link):
    """See `link.Link`. Its calls take no time themselves: `MemoryLinks.blocking` waits for them."""

    kind = BACKEND

    def __init__(self, fabric: TransferFabric, name: str, wire: _Wire, giving: bool) -> None:
        super().__init__(name)
        self._fabric, self._wire, self._giving = fabric, wire, giving
        self._sent_at = 0.0
        self._expects = False

    def transfer(
        self,
        session: str,
        source: Memory | Remote,
        target: Memory | Remote,
        page_range: range,
        deadline: Deadline,
    ) -> int:
        """See `Link.transfer`."""
        if isinstance(source, Memory):
            return self._send(source.parts(page_range))
        assert isinstance(target, Memory)
        return self._take(target, page_range)

    async def before(self, deadline: Deadline) -> None:
        """At the target: until a round is there. Raises `TransferError`."""
        if self._giving:
            return
        wire, loop = self._wire, self._fabric.loop
        try:
            async with asyncio.timeout(deadline.left(PROGRESS_S)):
                while not wire.rounds:
                    wire.arrived.clear()
                    await wire.arrived.wait()
        except TimeoutError:
            raise self._lost(deadline) from None
        there_at = wire.rounds[0][0]
        if there_at == math.inf:
            await asyncio.sleep(deadline.left(PROGRESS_S))
            raise self._lost(deadline)
        await asyncio.sleep(min(max(0.0, there_at - loop.time()), deadline.left()))
        if not wire.source.alive or wire.source.frozen_until > loop.time():
            await asyncio.sleep(deadline.left(PROGRESS_S))
            raise self._lost(deadline)
        deadline.left()

    async def after(self, deadline: Deadline) -> None:
        """At the source: until what was sent is there. Raises `TransferError`."""
        if self._giving and self._sent_at > self._fabric.loop.time():
            if self._sent_at == math.inf:
                await asyncio.sleep(deadline.left(PROGRESS_S))
                raise self._lost(deadline)
            await asyncio.sleep(min(self._sent_at - self._fabric.loop.time(), deadline.left()))
            deadline.left()

    def close(self) -> None:
        """See `Link.close`."""
        self.closed = True
        self._fabric.wires.pop(self.name, None)

    def _send(self, parts: list[torch.Tensor]) -> int:
        fabric, pages = self._fabric, [part.numpy().tobytes() for part in parts]
        size = sum(map(len, pages))
        if fabric.chance(fabric.faults.corrupts) and size:
            pages[0] = bytes([pages[0][0] ^ 1]) + pages[0][1:]
        stalls = fabric.chance(fabric.faults.stalls)
        self._sent_at = math.inf if stalls else fabric.loop.time() + size / fabric.bytes_per_s
        self._wire.rounds.append((self._sent_at, pages))
        self._wire.arrived.set()
        return size

    def _take(self, target: Memory, page_range: range) -> int:
        _, pages = self._wire.rounds.pop(0)
        parts = target.parts(page_range)
        if [len(page) for page in pages] != [part.numel() for part in parts]:
            self.close()
            raise Truncated("memory: what came is not what was announced")
        for part, page in zip(parts, pages, strict=True):
            part.copy_(torch.frombuffer(bytearray(page), dtype=torch.uint8))
        return sum(map(len, pages))

    def _lost(self, deadline: Deadline) -> PeerLost:
        self.close()
        deadline.left()
        return PeerLost(f"memory: nothing has moved for {PROGRESS_S:g} s")


class MemoryLinks:
    """See `network.LinkTable`. A link is made anew for each session."""

    backends = (BACKEND,)

    def __init__(self, fabric: TransferFabric, model: str) -> None:
        self._fabric, self.model = fabric, model

    def hello(self, source: str, limit_s: float) -> Hello:
        """See `LinkTable.hello`."""
        return Hello(model=self.model, backends=self.backends, limit_s=limit_s)

    async def give(
        self, channel: Channel, hello: Hello, peer: str, key: bytes, at_rest: bool, deadline: Deadline
    ) -> Link:
        """See `LinkTable.give`."""
        if BACKEND not in hello.backends:
            raise NoBackend(f"backends: {list(self.backends)} here, {list(hello.backends)} there")
        name, fabric = self._fabric.new_link(), self._fabric
        wire = fabric.wires[name] = _Wire(current() or fabric.loop.world)
        link = MemoryLink(fabric, name, wire, giving=True)
        try:
            await channel.send(Welcome(backend=BACKEND, link=name), deadline.left())
        except BaseException:
            link.close()
            raise
        return link

    async def take(
        self, channel: Channel, welcome: Welcome, source: str, key: bytes, deadline: Deadline
    ) -> Link:
        """See `LinkTable.take`."""
        if welcome.backend != BACKEND:
            raise ProtocolBroken(f"backend: {welcome.backend} was not on offer")
        fabric, name = self._fabric, welcome.link
        # Where the source has given up meanwhile nothing comes over the link, and the channel says why.
        wire = fabric.wires.get(name) or _Wire(fabric.loop.world)
        return MemoryLink(fabric, name, wire, giving=False)

    def put_back(self, peer: str, link: Link, *, giving: bool) -> None:
        """See `LinkTable.put_back`."""
        link.close()

    async def blocking(self, call: Callable[[], T], deadline: Deadline, link: Link | None = None) -> T:
        """See `LinkTable.blocking`."""
        memory = link if isinstance(link, MemoryLink) else None
        try:
            if memory is None:
                return call()
            if memory.closed:
                raise Aborted("the link is closed")
            await memory.before(deadline)
            result = call()
            await memory.after(deadline)
            return result
        except asyncio.CancelledError:
            deadline.abort()
            if memory is not None:
                memory.close()
            raise

    def close(self) -> None:
        """See `LinkTable.close`. What is in use closes with its transfer."""


async def _served(serving: Any) -> None:
    await serving


def _outside() -> Any:
    """A context of no process: what is on the wire arrives whoever dies."""
    from contextvars import Context

    return Context()

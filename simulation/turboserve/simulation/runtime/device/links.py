"""Memory links between simulated workers: data arrives after the time that its transfer takes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from typing import TypeVar

import torch

from turboserve.simulation.runtime.device.fabric import TransferFabric, Wire
from turboserve.simulation.runtime.process import current
from turboserve.worker.transfer.channel import Channel
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import (
    NoCommonBackendError,
    PeerLostError,
    TransferAbortedError,
    TransferProtocolError,
    TruncatedStateError,
)
from turboserve.worker.transfer.frames import Hello, Welcome
from turboserve.worker.transfer.link import PROGRESS_S, Link, LocalPages, RemotePages

T = TypeVar("T")
BACKEND = "memory"


class MemoryLink(Link):
    """See `link.Link`. Its calls take no time; `MemoryLinks.blocking` waits for them."""

    kind = BACKEND

    def __init__(self, fabric: TransferFabric, name: str, wire: Wire, giving: bool) -> None:
        super().__init__(name)
        self._fabric, self._wire, self._giving = fabric, wire, giving
        self._sent_at = 0.0
        self._expects = False

    def transfer(
        self,
        session: str,
        source: LocalPages | RemotePages,
        target: LocalPages | RemotePages,
        page_range: range,
        deadline: Deadline,
    ) -> int:
        """See `Link.transfer`."""
        if isinstance(source, LocalPages):
            return self._send(source.parts(page_range))
        assert isinstance(target, LocalPages)
        return self._take(target, page_range)

    async def before(self, deadline: Deadline) -> None:
        """At the target: wait until a round has arrived. Raises `TransferError`."""
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
        """At the source: wait until the sent round has arrived. Raises `TransferError`."""
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

    def _take(self, target: LocalPages, page_range: range) -> int:
        _, pages = self._wire.rounds.pop(0)
        parts = target.parts(page_range)
        if [len(page) for page in pages] != [part.numel() for part in parts]:
            self.close()
            raise TruncatedStateError("memory: received data differs from the announced data")
        for part, page in zip(parts, pages, strict=True):
            part.copy_(torch.frombuffer(bytearray(page), dtype=torch.uint8))
        return sum(map(len, pages))

    def _lost(self, deadline: Deadline) -> PeerLostError:
        self.close()
        deadline.left()
        return PeerLostError(f"memory: no progress for {PROGRESS_S:g} s")


class MemoryLinks:
    """See `network.LinkTable`. Each session has its own link."""

    backends = (BACKEND,)

    def __init__(self, fabric: TransferFabric, model: str) -> None:
        self._fabric, self.model = fabric, model

    def hello(self, source: str, limit_s: float, failed: Collection[str] = ()) -> Hello:
        """See `LinkTable.hello`."""
        return Hello(model=self.model, backends=self.backends, limit_s=limit_s)

    async def give(
        self, channel: Channel, hello: Hello, peer: str, key: bytes, quiesced: bool, deadline: Deadline
    ) -> Link:
        """See `LinkTable.give`."""
        if BACKEND not in hello.backends:
            raise NoCommonBackendError(f"backends: {list(self.backends)} here, {list(hello.backends)} there")
        name, fabric = self._fabric.new_link(), self._fabric
        wire = fabric.wires[name] = Wire(current() or fabric.loop.world)
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
            raise TransferProtocolError(f"backend: {welcome.backend} was not offered")
        fabric, name = self._fabric, welcome.link
        # If the source has given up meanwhile, nothing comes over the link, and the channel reports the
        # reason.
        wire = fabric.wires.get(name) or Wire(fabric.loop.world)
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
                raise TransferAbortedError("the link is closed")
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
        """See `LinkTable.close`. A link in use closes with its transfer."""

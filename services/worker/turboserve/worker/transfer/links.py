"""The links of one worker: its backends, its idle links, and the negotiation of both sides."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import torch
import torch.distributed as dist
from pydantic import IPvAnyAddress
from torch._C._distributed_c10d import HashStore

from turboserve.worker.transfer import nccl, nixl, pair, rendezvous, shm
from turboserve.worker.transfer.channel import Channel
from turboserve.worker.transfer.deadline import Deadline, ended
from turboserve.worker.transfer.errors import (
    NoCommonBackendError,
    PeerLostError,
    TransferError,
    TransferProtocolError,
)
from turboserve.worker.transfer.frames import Hello, Welcome
from turboserve.worker.transfer.interface import Interface
from turboserve.worker.transfer.link import Link

CONNECT_S = 5.0
"""Longest time in which a new link must be ready, seconds."""
LATE_S = 1.0
"""Delay by which a call may exceed its timeout, seconds."""
IDLE_LIMIT = 8
"""Number of idle links that are kept. The least recently used is closed first."""
THREADS = 16

T = TypeVar("T")


def available(backend: str, device: torch.device) -> bool:
    """Whether this process can use the backend for state on this device."""
    match backend:
        case "nccl":
            return device.type == "cuda" and dist.is_available() and dist.is_nccl_available()
        case "gloo":
            return dist.is_available() and dist.is_gloo_available()
        case "nixl":
            return nixl.installed()
        case "shm":
            return shm.usable()
    return False


class Links:
    """Owns the links of one worker, on the event loop. Blocking calls run on separate threads."""

    def __init__(
        self,
        backends: Sequence[str],
        device: torch.device,
        model: str,
        interface: Interface = Interface(),  # noqa: B008 - frozen.
    ) -> None:
        """Find the available backends.

        `backends`: in order of preference; what this machine lacks is left out. `model`: the
        `state_fingerprint` of the model whose sessions are transferred. `interface`: where the libraries
        listen.
        """
        self.model = model
        self._interface = interface
        self.backends = tuple(name for name in backends if available(name, device))
        self._device = device
        self._gpu = nccl.gpu_uuid(device)
        self._idle: list[tuple[str, bool, Link]] = []
        """Idle links as (peer, whether this worker is the source, link), the least recently used first. A
        source identifies peers by their ids, a target by the address that it connected to."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="transfer")

    @property
    def idle(self) -> int:
        return len(self._idle)

    async def blocking(self, call: Callable[[], T], deadline: Deadline, link: Link | None = None) -> T:
        """Run `call` on a thread. A cancellation, even a repeated one, first ends the call: no memory is in
        use afterwards."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            deadline.abort()
            if link is not None:
                link.close()
            await ended(future)
            raise

    async def connecting(self, call: Callable[[], T], seconds: float, drop: Callable[[T], object]) -> T:
        """Run `call` on a new thread, and abandon it if it takes longer than `seconds` or is canceled.

        An abandoned call ends by its own timeouts; no session's memory is in use yet. A late result is passed
        to `drop`. Raises `PeerLostError`, and the errors of `call`.
        """
        loop = asyncio.get_running_loop()
        coming: asyncio.Future[T] = loop.create_future()

        def settle(done: Future[T]) -> None:
            error = done.exception()
            if coming.done():
                if error is None:
                    drop(done.result())
            elif error is not None:
                coming.set_exception(error)
            else:
                coming.set_result(done.result())

        def run() -> None:
            done: Future[T] = Future()
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)
            # The loop may be closed by now.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, done)

        threading.Thread(target=run, name="transfer-connect", daemon=True).start()
        try:
            async with asyncio.timeout(seconds + LATE_S):
                return await coming
        except TimeoutError:
            raise PeerLostError(f"no link within {seconds:.3g} s") from None

    def hello(self, source: str, limit_s: float, failed: Collection[str] = ()) -> Hello:
        """The frame that an admitted target sends. `source`: the address under which its links are kept;
        `limit_s`: time after which the target gives up; `failed`: backends that come last now."""
        warm = tuple(link.name for peer, giving, link in self._idle if peer == source and not giving)
        return Hello(
            model=self.model,
            # `sorted` is stable: otherwise the order of preference remains.
            backends=tuple(sorted(self.backends, key=lambda name: name in failed)),
            warm=warm,
            machine=shm.machine(),
            limit_s=limit_s,
            device=self._device.type,
            gpu=self._gpu,
            addresses=self._addresses,
        )

    async def give(
        self, channel: Channel, hello: Hello, peer: str, key: bytes, quiesced: bool, deadline: Deadline
    ) -> Link:
        """At the source: choose a link to the target, announce it, and create it if necessary.

        `peer` is the target's id. `key` is the key of the MACs on a new link (`handshake.Keys.link`). Raises
        `TransferError`.
        """
        backend = self._choose(hello, quiesced)
        warm = self._take(peer, giving=True, names=hello.warm, backend=backend)
        if warm is not None:
            await channel.send(Welcome(backend=backend, link=warm.name, warm=True), deadline.left())
            return warm
        name = secrets.token_hex(8)
        welcome = Welcome(backend=backend, link=name, addresses=self._addresses)
        await channel.send(welcome, deadline.left())
        ends = self._ends(channel, key, hello.addresses)
        return await self._make(backend, name, pair.SOURCE, channel, ends, deadline)

    async def take(
        self, channel: Channel, welcome: Welcome, source: str, key: bytes, deadline: Deadline
    ) -> Link:
        """At the target: return the other end of the link. `key` as in `give`. Raises `TransferError`."""
        if welcome.backend not in self.backends:
            raise TransferProtocolError(f"backend: {welcome.backend} was not offered")
        if welcome.warm:
            link = self._take(source, giving=False, names=(welcome.link,), backend=welcome.backend)
            if link is None:
                raise PeerLostError(f"link: {welcome.link} is no longer free")
            return link
        ends = self._ends(channel, key, welcome.addresses)
        return await self._make(welcome.backend, welcome.link, pair.TARGET, channel, ends, deadline)

    def put_back(self, peer: str, link: Link, *, giving: bool) -> None:
        """Keep the link for the next transfer, unless it is closed."""
        if link.closed:
            return
        link.release()
        self._idle.append((peer, giving, link))
        while len(self._idle) > IDLE_LIMIT:
            self._idle.pop(0)[2].close()

    def close(self) -> None:
        """Close idle links. A link in use closes with its transfer."""
        while self._idle:
            self._idle.pop()[2].close()
        self._threads.shutdown(wait=False)

    def common(self, hello: Hello, quiesced: bool) -> list[str]:
        """The backends that both workers can use, in the target's order of preference.

        `quiesced`: what is transferred is in host memory.
        """
        near = hello.machine == shm.machine() != ""
        return [
            name
            for name in hello.backends
            if name in self.backends
            and (near or name != "shm")
            # State in host memory is not sent by device backends.
            and (name != "nccl" or (not quiesced and self._nccl_reaches(hello)))
        ]

    def _choose(self, hello: Hello, quiesced: bool) -> str:
        common = self.common(hello, quiesced)
        if not common:
            raise NoCommonBackendError(f"backends: {list(self.backends)} here, {list(hello.backends)} there")
        return common[0]

    def _nccl_reaches(self, hello: Hello) -> bool:
        # Two workers may share a GPU.
        shared = hello.gpu == self._gpu != ""
        return self._device.type == hello.device == "cuda" and not shared

    def _take(self, peer: str, *, giving: bool, names: Sequence[str], backend: str) -> Link | None:
        for place, (who, ours, link) in enumerate(self._idle):
            if who == peer and ours == giving and link.name in names and link.kind == backend:
                del self._idle[place]
                return None if link.closed else link
        return None

    @property
    def _addresses(self) -> tuple[IPvAnyAddress, ...]:
        return tuple(map(ipaddress.ip_address, self._interface.addresses))

    def _ends(self, channel: Channel, key: bytes, named: Sequence[IPvAnyAddress]) -> pair.LinkEndpoints:
        peers = dict.fromkeys([channel.peer.partition("%")[0], *map(str, named)])
        return pair.LinkEndpoints(key, self._interface.address, tuple(filter(None, peers)))

    async def _make(
        self,
        backend: str,
        name: str,
        rank: int,
        channel: Channel,
        ends: pair.LinkEndpoints,
        deadline: Deadline,
    ) -> Link:
        seconds = deadline.left(CONNECT_S)
        try:
            match backend:
                case "nixl":
                    role = pair.ROLES[rank]
                    return await self.blocking(lambda: nixl.NixlLink(name, role, ends.peers), deadline)
                case "shm":
                    return shm.ShmLink(name)
            store = rendezvous.new_store(seconds)

            def make() -> Link:
                if backend == "gloo":
                    return pair.GlooLink(name, store, rank, ends, seconds)
                return nccl.NcclLink(name, store, rank, ends, self._device, seconds)

            return await self._met(channel, store, make, seconds, deadline)
        except RuntimeError as error:
            raise TransferError(f"{backend}: {error}") from error

    async def _met(
        self,
        channel: Channel,
        store: HashStore,
        make: Callable[[], Link],
        seconds: float,
        deadline: Deadline,
    ) -> Link:
        """Create the link, and exchange the entries of its store with the other side."""
        making = asyncio.create_task(self.connecting(make, seconds, Link.close))
        try:
            # One side may be ready well before the other.
            standing = Deadline(deadline.left(seconds + 2 * LATE_S))
            await rendezvous.exchange(channel, store, making, standing)
        except BaseException:
            making.cancel()
            await asyncio.wait([making])
            if not making.cancelled() and making.exception() is None:
                making.result().close()
            raise
        return making.result()

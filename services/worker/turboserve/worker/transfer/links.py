"""The links of one worker: which backends it has, which links stand ready, and how the two sides agree."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from turboserve.worker.transfer import nixl, pair, shm
from turboserve.worker.transfer.cut import cut
from turboserve.worker.transfer.deadline import Deadline, ended
from turboserve.worker.transfer.errors import NoBackend, PeerLost, ProtocolBroken, TransferError
from turboserve.worker.transfer.frames import Channel, Hello, Welcome
from turboserve.worker.transfer.link import Link

BACKENDS = ("nccl", "gloo", "nixl", "shm")
CONNECT_S = 5.0
"""A new link has to stand within this long."""
LATE_S = 1.0
"""By how much a call with a time-out may miss it."""
IDLE_LIMIT = 8
"""Links that are kept warm; the one that was unused longest goes first."""
THREADS = 16

T = TypeVar("T")


def available(backend: str, device: torch.device) -> bool:
    """Whether this process can use it for state on this device."""
    match backend:
        case "nccl":
            return device.type == "cuda" and dist.is_available() and dist.is_nccl_available()
        case "gloo":
            return dist.is_available() and dist.is_gloo_available()
        case "nixl":
            return nixl.installed()
        case "shm":
            return bool(shm.machine())
    return False


class Links:
    """Owned by the event loop; what blocks is done on threads of its own."""

    def __init__(self, backends: Sequence[str], device: torch.device, model: str) -> None:
        """`backends`: in order of preference; what this machine does not have is left out. `model`: the
        fingerprint of the model whose sessions move here."""
        self.model = model
        self.backends = tuple(name for name in backends if available(name, device))
        self._device = device
        self._idle: list[tuple[str, bool, Link]] = []
        """(peer, whether we are the source, link), the longest unused first. A source knows its peers by
        their ids, a target by the address that it asked."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="transfer")

    @property
    def idle(self) -> int:
        return len(self._idle)

    async def blocking(self, call: Callable[[], T], deadline: Deadline, link: Link | None = None) -> T:
        """Do it on a thread. Cancelled, even more than once, it first ends the call, so that no memory is in
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

    async def connecting(
        self, call: Callable[[], T], seconds: float, server: tuple[str, int], drop: Callable[[T], object]
    ) -> T:
        """Do it on a thread of its own, which is left behind if it is not back soon after `seconds`: torch's
        store waits without end for a `server` that stands still, until its connection is cut here, also where
        nobody waits for it any more. No session's memory is in use yet. What comes too late is given to
        `drop`. Raises `PeerLost`, and what `call` does."""
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

        thread = threading.Thread(target=run, name="transfer-connect", daemon=True)

        def end() -> None:
            # Again and again: it may have had no connection yet, and until its own time-out it makes another.
            if thread.is_alive():
                cut(*server)
                loop.call_later(LATE_S, end)

        thread.start()
        try:
            async with asyncio.timeout(seconds + LATE_S):
                return await coming
        except TimeoutError:
            end()
            raise PeerLost(f"no link within {seconds:.3g} s") from None
        except asyncio.CancelledError:
            end()
            raise

    def hello(self, session: str, move: int, worker: str, source: str, limit_s: float) -> Hello:
        """What a target says first. `source`: the address that its links are kept under; `limit_s`: how long
        it waits."""
        warm = tuple(link.name for peer, giving, link in self._idle if peer == source and not giving)
        return Hello(
            session=session,
            move=move,
            worker=worker,
            model=self.model,
            backends=self.backends,
            warm=warm,
            machine=shm.machine(),
            limit_s=limit_s,
            device=self._device.type,
        )

    async def give(self, channel: Channel, hello: Hello, at_rest: bool, deadline: Deadline) -> Link:
        """At the source: choose a way to the target, tell it, and have it stand. Raises `TransferError`."""
        backend = self._choose(hello, at_rest)
        warm = self._take(hello.worker, giving=True, names=hello.warm, backend=backend)
        if warm is not None:
            await channel.send(Welcome(backend=backend, link=warm.name, warm=True), deadline.left())
            return warm
        name = secrets.token_hex(8)
        seconds = deadline.left(CONNECT_S)
        store = pair.serve_store(channel.host, seconds) if backend in ("gloo", "nccl") else None
        where = None if store is None else (channel.host, int(store.port))
        await channel.send(Welcome(backend=backend, link=name, store=where), deadline.left())
        return await self._make(backend, name, pair.SOURCE, store, channel.host, deadline)

    async def take(self, channel: Channel, welcome: Welcome, source: str, deadline: Deadline) -> Link:
        """At the target: the other end of it. Raises `TransferError`."""
        if welcome.backend not in self.backends:
            raise ProtocolBroken(f"backend: {welcome.backend} was not on offer")
        if welcome.warm:
            link = self._take(source, giving=False, names=(welcome.link,), backend=welcome.backend)
            if link is None:
                raise PeerLost(f"link: {welcome.link} is not free any more")
            return link
        store = None
        if welcome.backend in ("gloo", "nccl"):
            if welcome.store is None:
                raise ProtocolBroken(f"backend: {welcome.backend} without a rendezvous")
            host, port = welcome.store
            seconds = deadline.left(CONNECT_S)
            store = await self.connecting(
                lambda: pair.join_store(host, port, seconds), seconds, welcome.store, lambda late: None
            )
        return await self._make(welcome.backend, welcome.link, pair.TARGET, store, channel.host, deadline)

    def put_back(self, peer: str, link: Link, *, giving: bool) -> None:
        """Keep it warm, unless it is closed."""
        if link.closed:
            return
        self._idle.append((peer, giving, link))
        while len(self._idle) > IDLE_LIMIT:
            self._idle.pop(0)[2].close()

    def close(self) -> None:
        """Close what is idle; what is in use closes with its transfer."""
        while self._idle:
            self._idle.pop()[2].close()
        self._threads.shutdown(wait=False)

    def _choose(self, hello: Hello, at_rest: bool) -> str:
        near = hello.machine == shm.machine() != ""
        common = [
            name
            for name in hello.backends
            if name in self.backends
            and (near or name != "shm")
            and (self._device.type == hello.device == "cuda" or name != "nccl")
        ]
        if at_rest and near and "shm" in common:
            return "shm"
        # State in host memory has no business on a device's wires.
        common = [name for name in common if name != "nccl" or not at_rest]
        if not common:
            raise NoBackend(f"backends: {list(self.backends)} here, {list(hello.backends)} there")
        return common[0]

    def _take(self, peer: str, *, giving: bool, names: Sequence[str], backend: str) -> Link | None:
        for place, (who, ours, link) in enumerate(self._idle):
            if who == peer and ours == giving and link.name in names and link.kind == backend:
                del self._idle[place]
                return None if link.closed else link
        return None

    async def _make(
        self,
        backend: str,
        name: str,
        rank: int,
        store: TCPStore | None,
        host: str,
        deadline: Deadline,
    ) -> Link:
        seconds = deadline.left(CONNECT_S)

        def make() -> Link:
            match backend:
                case "gloo":
                    assert store is not None
                    return pair.GlooLink(name, store, rank, host, seconds)
                case "nccl":
                    assert store is not None
                    return pair.NcclLink(name, store, rank, self._device, seconds)
                case "nixl":
                    return nixl.NixlLink(name, "source" if rank == pair.SOURCE else "target")
            return shm.ShmLink(name)

        try:
            if store is not None:
                return await self.connecting(make, seconds, (store.host, int(store.port)), Link.close)
            return await self.blocking(make, deadline)
        except RuntimeError as error:
            raise TransferError(f"{backend}: {error}") from error

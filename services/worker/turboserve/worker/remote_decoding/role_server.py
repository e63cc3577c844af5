"""What decode workers and text workers have in common: who may ask, and one computation at a time.

Such a worker owns no session and publishes nothing.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

import torch

from turboserve import logs
from turboserve.worker.engine.streams import DEVICE_LOST
from turboserve.worker.remote_decoding.frames import (
    DecodeChannel,
    DecodeFrame,
    DecodeHello,
    DecodeWelcome,
)
from turboserve.worker.remote_decoding.linking import make_links, offered
from turboserve.worker.transfer import handshake
from turboserve.worker.transfer.channel import ByteReader, ByteWriter, refuse, unexpected
from turboserve.worker.transfer.errors import (
    DeadlineExceededError,
    LayoutMismatchError,
    TransferBackendError,
    TransferError,
)
from turboserve.worker.transfer.frames import Hello, Open
from turboserve.worker.transfer.half_open_connections import HalfOpenConnections
from turboserve.worker.transfer.links import Links

ADMIT_S = 3.0
"""Longest time until a peer has proved the key, seconds."""
ANSWER_S = 5.0
"""Longest time in which a worker takes its answer, seconds."""
END_S = 3.0
"""Longest time in which the connections end when the server does, seconds."""
QUIET_S = 86_400.0
"""Longest time without a question. A frozen worker sends none, and costs a connection."""
HANGS_S = 120.0
"""Time after which a computation ends the process, seconds: its device no longer computes."""

log = logs.get("decoding")
T = TypeVar("T")


class DeviceHangsError(RuntimeError):
    """A computation does not return. The process must be replaced."""


class RoleServer(ABC):
    """Serves all connections of one worker, with one computation at a time, in the order of arrival."""

    def __init__(
        self,
        purpose: str,
        worker: str,
        model: str,
        key: bytes,
        now: Callable[[], float],
        thread: Executor | None = None,
        links: Links | None = None,
    ) -> None:
        """`purpose`: name of what is asked for, in the handshake. `model`: `state_fingerprint` of the
        weights. `key`: that the workers must prove. `thread`: that of the device. None: a new one. `links`:
        over which payloads pass where both ends can."""
        self._purpose, self._worker, self._model, self._key, self._now = purpose, worker, model, key, now
        self._links = links
        self._half_open = HalfOpenConnections(now=now)
        self._serving: dict[asyncio.Task[None], DecodeChannel] = {}
        self._turn = asyncio.Lock()
        # The first call of a thread sets its number of threads to the process's.
        self._thread = thread or ThreadPoolExecutor(1, purpose, torch.get_num_threads)
        self._device_lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @abstractmethod
    async def _question(
        self, channel: DecodeChannel, worker: str, capacity: int, question: DecodeFrame
    ) -> None:
        """Answer one question of a worker whose K is `capacity`. Raises `TransferError`."""

    def _left(self, worker: str, channel: DecodeChannel) -> None:  # noqa: B027
        """Note that a worker's connection is closed."""

    async def run(self) -> None:
        """Wait until canceled. Raises the error of a failed device, and `DeviceHangsError`: the process has
        to end."""
        try:
            await self._device_lost
        finally:
            for channel in self._serving.values():
                channel.abort()
            if self._serving:
                await asyncio.wait([*self._serving], timeout=END_S)
            self._thread.shutdown(wait=False)
            if self._links is not None:
                self._links.close()

    async def serve(self, reader: ByteReader, writer: ByteWriter) -> None:
        """Serve one connection until its end."""
        channel = DecodeChannel(reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._serving[task] = channel
        try:
            await self._serve(channel)
            await channel.close()
        finally:
            del self._serving[task]

    async def _serve(self, channel: DecodeChannel) -> None:
        try:
            with self._half_open.held(channel.peer, channel.abort):
                async with asyncio.timeout(ADMIT_S):
                    opened, keys = await handshake.admit(channel, self._key_of, ADMIT_S)
        except (TransferError, TimeoutError) as error:
            self._half_open.refused(channel.peer, error)
            return
        try:
            capacity = await self._welcome(channel, opened, keys)
            links = "" if channel.links is None else channel.links.kinds
            log.info("worker asks here", worker=opened.worker, purpose=self._purpose, links=links)
            while True:
                question = await channel.next(QUIET_S)
                await self._question(channel, opened.worker, capacity, question)
        except TransferError as error:
            log.info("worker left", worker=opened.worker, error=str(error))
            await refuse(channel, _code(channel, error), str(error))
        except DEVICE_LOST as error:
            if not self._device_lost.done():
                self._device_lost.set_exception(error)
        except Exception as error:
            # What one question raises ends its connection: the worker itself computes it, and learns why.
            log.exception("question not answered", worker=opened.worker, purpose=self._purpose)
            await refuse(channel, TransferError.code, repr(error))
        finally:
            self._left(opened.worker, channel)

    def _hangs(self) -> None:
        if not self._device_lost.done():
            error = DeviceHangsError(f"{self._purpose}: a computation has no result after {HANGS_S:g} s")
            self._device_lost.set_exception(error)

    def _key_of(self, purpose: str, number: int) -> bytes | None:
        return self._key if (purpose, number) == (self._purpose, 0) else None

    async def _welcome(self, channel: DecodeChannel, opened: Open, keys: handshake.Keys) -> int:
        """Answer a worker's first frame, and make links where both ends can. Returns the worker's K."""
        hello = await channel.next(ADMIT_S)
        if not isinstance(hello, DecodeHello):
            raise unexpected(hello)
        if hello.model != self._model:
            raise LayoutMismatchError(f"model: {hello.model}, {self._model} is computed here")
        own = None if hello.link is None else self._offered(opened.worker, hello.link)
        await channel.post(DecodeWelcome(worker=self._worker, link=own), (), ADMIT_S)
        if own is not None and hello.link is not None and self._links is not None:
            theirs = hello.link.model_copy(update={"backends": own.backends})
            await make_links(self._links, channel, theirs, opened.worker, keys.link, first=True)
        return hello.capacity

    def _offered(self, worker: str, theirs: Hello) -> Hello | None:
        """What is answered about links: the backends that both ends can use."""
        common = [] if self._links is None else self._links.common(theirs, quiesced=True)
        return offered(self._links, worker, common)

    async def _on_device(self, call: Callable[[], T]) -> T:
        """Return the result of a call on the device's thread. One that hangs ends the process."""
        loop = asyncio.get_running_loop()
        hangs = loop.call_later(HANGS_S, self._hangs)
        try:
            return await loop.run_in_executor(self._thread, call)
        finally:
            hangs.cancel()


def _code(channel: DecodeChannel, error: TransferError) -> str:
    """What the worker is told. A link that has failed here, and was not only late, is the backend's fault."""
    at_fault = channel.links is not None and channel.links.failed
    late = isinstance(error, DeadlineExceededError)
    return TransferBackendError.code if at_fault and not late else error.code

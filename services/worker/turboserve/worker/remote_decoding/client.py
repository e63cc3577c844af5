"""A worker's connections to the decode workers, and its chunks' way to them.

The event loop has the connections. The engine's decode executor waits for the frames on its own thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from turboserve import logs
from turboserve.worker import metrics
from turboserve.worker.engine.decode_jobs import DecodeJob
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.remote_decoding.frames import (
    PURPOSE,
    ChunkFrames,
    DecodeChannel,
    DecodeChunk,
    DecodeHello,
    DecodeWelcome,
    NoCache,
    NoRoom,
    TensorSpec,
)
from turboserve.worker.remote_decoding.routing import (
    RECONNECT_S,
    WORKERS_PER_CHUNK,
    AskFailed,
    AskWorker,
    CacheMissed,
    ChunkAbandoned,
    ChunkDecoded,
    ChunkWaits,
    DecodeHere,
    DecoderConnected,
    DecoderDisconnected,
    DecodeRouter,
    RoomRefused,
    RoutingEvent,
    next_pause_s,
)
from turboserve.worker.transfer import handshake
from turboserve.worker.transfer.channel import ByteReader, ByteWriter, unexpected
from turboserve.worker.transfer.errors import DeadlineExceededError, PeerLostError, TransferError
from turboserve.worker.transfer.frames import Open
from turboserve.worker.transfer.target import parse_address

BUFFER_BYTES = 4 << 20
"""Frames that are read at once, bytes: a chunk of a public model has 14 MB."""
CONNECT_S = 5.0

log = logs.get("decoding")
Connect = Callable[[str, int], Awaitable[tuple[ByteReader, ByteWriter]]]
CONNECT: Connect = partial(asyncio.open_connection, limit=BUFFER_BYTES)


class DecodeConnection:
    """An authenticated connection to one decode worker. One chunk at a time."""

    def __init__(self, worker: str, channel: DecodeChannel, config: ModelConfig) -> None:
        self.worker = worker
        self.closed = asyncio.Event()
        self.late = False
        """Whether the connection was closed because an answer was late."""
        self._channel, self._config = channel, config
        self._turn = asyncio.Lock()
        self._numbers = itertools.count()

    async def ask(self, job: DecodeJob, *, with_context: bool, seconds: float) -> NoCache | NoRoom | Tensor:
        """The frames of a chunk, or what the worker lacks. A failed connection closes.

        Raises `TransferError`.
        """
        try:
            async with asyncio.timeout(seconds), self._turn:
                return await self._ask(job, with_context, seconds)
        except (TimeoutError, DeadlineExceededError):
            self.late = True
            self.close()
            raise DeadlineExceededError(f"{self.worker}: not within {seconds:.3g} s") from None
        except BaseException:
            # A canceled question has an answer that no later one must take for its own.
            self.close()
            raise

    async def _ask(self, job: DecodeJob, with_context: bool, seconds: float) -> NoCache | NoRoom | Tensor:
        if self.closed.is_set():
            raise PeerLostError(f"{self.worker}: the connection is closed")
        payloads: tuple[Tensor, ...] = (job.latents,)
        if with_context:
            # Copies from the device may wait for its work: not on the event loop's thread.
            payloads = (job.latents, await asyncio.to_thread(_stacked, job.context))
        number = next(self._numbers)
        question = DecodeChunk(
            number=number,
            session=job.session,
            index=job.index,
            base=job.base,
            digest=job.digest,
            latents=TensorSpec.of(payloads[0]),
            context=TensorSpec.of(payloads[1]) if with_context else None,
        )
        await self._channel.post(question, payloads, seconds)
        answer = await self._channel.next(seconds)
        if not isinstance(answer, ChunkFrames | NoCache | NoRoom) or answer.number != number:
            raise unexpected(answer)
        if not isinstance(answer, ChunkFrames):
            return answer
        width, height = self._config.frame_size
        frames = len(job.latents) * self._config.frames_per_latent
        count = frames if job.base is not None else frames - self._config.frames_per_latent + 1
        return await self._channel.payload(answer.frames, (count, height, width, 3), seconds)

    def close(self) -> None:
        """Close the connection at once."""
        if not self.closed.is_set():
            self.closed.set()
            self._channel.abort()


class DecodeClient:
    """See `RemoteDecoder`. Keeps a connection to each decode worker."""

    def __init__(
        self,
        worker: str,
        model: str,
        config: ModelConfig,
        addresses: Sequence[str],
        key: bytes,
        timeout_s: float,
        connect: Connect = CONNECT,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`worker`, `model`: id and `state_fingerprint` of this worker. `addresses`, `key`: of the decode
        workers. `timeout_s`: limit of one question, seconds."""
        self._worker, self._model, self._config = worker, model, config
        self._addresses, self._key, self._timeout_s = addresses, key, timeout_s
        self._connect, self._now = connect, now
        self.router = DecodeRouter()
        self._connections: dict[str, DecodeConnection] = {}
        self._jobs = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        """Keep the connections until canceled."""
        self._loop = asyncio.get_running_loop()
        try:
            await asyncio.gather(*(self._keep_connected(address) for address in self._addresses))
        finally:
            self._loop = None
            for connection in [*self._connections.values()]:
                connection.close()

    def decode(self, jobs: Sequence[DecodeJob]) -> list[Tensor | None]:
        """See `RemoteDecoder.decode`. Call it on another thread than the event loop's."""
        found = self._found(jobs)
        if missing := found.count(None):
            metrics.decoded_here.add(missing)
        return found

    def _found(self, jobs: Sequence[DecodeJob]) -> list[Tensor | None]:
        loop = self._loop
        if loop is None or not self.router.workers:
            return [None] * len(jobs)
        asking = asyncio.run_coroutine_threadsafe(self._decode_all(jobs), loop)
        try:
            # One more than the deadlines of the workers that a chunk may ask.
            return asking.result((WORKERS_PER_CHUNK + 1) * self._timeout_s)
        except (TimeoutError, concurrent.futures.CancelledError):
            asking.cancel()
        except Exception:
            log.exception("chunks not decoded elsewhere")
        return [None] * len(jobs)

    async def _decode_all(self, jobs: Sequence[DecodeJob]) -> list[Tensor | None]:
        return list(await asyncio.gather(*(self._decode(job) for job in jobs)))

    async def _decode(self, job: DecodeJob) -> Tensor | None:
        number = next(self._jobs)
        try:
            return await self._asked(number, job)
        except BaseException:
            self.router.handle(ChunkAbandoned(number), self._now())
            raise

    async def _asked(self, number: int, job: DecodeJob) -> Tensor | None:
        event: RoutingEvent = ChunkWaits(number, job.session)
        until_s = 0.0
        while True:
            command = self.router.handle(event, self._now())
            if not isinstance(command, AskWorker):
                assert isinstance(command, DecodeHere)
                return None
            if not command.with_context:
                # Both questions of a worker have one deadline: the engine's thread waits for it.
                until_s = self._now() + self._timeout_s
            try:
                connection = self._connections[command.worker]
                left_s = until_s - self._now()
                answer = await connection.ask(job, with_context=command.with_context, seconds=left_s)
            except TransferError as error:
                log.warning(
                    "chunk not decoded by worker",
                    session=job.session,
                    chunk=job.index,
                    worker=command.worker,
                    error=str(error),
                )
                event = AskFailed(number)
                continue
            if isinstance(answer, Tensor):
                self.router.handle(ChunkDecoded(number), self._now())
                return answer
            event = CacheMissed(number) if isinstance(answer, NoCache) else RoomRefused(number)

    async def _keep_connected(self, address: str) -> None:
        pause_s, reported = RECONNECT_S, ""
        while True:
            began_s, late = self._now(), False
            try:
                late = await self._follow(address)
                reported = ""
            except (OSError, TransferError) as error:
                # One line for each reason, however long it lasts: a wrong key does not mend itself.
                if (reason := str(error) or repr(error)) != reported:
                    log.warning("no connection to decode worker", address=address, error=reason)
                reported = reason
            pause_s = next_pause_s(pause_s, self._now() - began_s, late=late)
            await asyncio.sleep(pause_s)

    async def _follow(self, address: str) -> bool:
        """Connect, and keep the connection until it closes. Returns whether that was for a late answer.

        Raises `OSError` and `TransferError`.
        """
        connection = await self._open(address)
        if connection.worker in self._connections:
            connection.close()
            raise TransferError(f"{connection.worker} is connected at another address: ids must differ")
        self._connections[connection.worker] = connection
        self.router.handle(DecoderConnected(connection.worker), self._now())
        metrics.decode_workers.set(self.router.workers)
        log.info("decode worker ready", worker=connection.worker, address=address)
        try:
            await connection.closed.wait()
            return connection.late
        finally:
            connection.close()
            self.router.handle(DecoderDisconnected(connection.worker), self._now())
            metrics.decode_workers.set(self.router.workers)
            del self._connections[connection.worker]
            log.warning("decode worker lost", worker=connection.worker, address=address)

    async def _open(self, address: str) -> DecodeConnection:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await self._connect(*parse_address(address))
        except TimeoutError:
            raise DeadlineExceededError(f"{address}: no connection within {CONNECT_S:g} s") from None
        channel = DecodeChannel(reader, writer)
        opened = Open(session=PURPOSE, migration=0, worker=self._worker, nonce=handshake.new_nonce())
        try:
            await handshake.authenticate(channel, opened, self._key, CONNECT_S)
            await channel.post(DecodeHello(model=self._model), (), CONNECT_S)
            welcome = await channel.next(CONNECT_S)
            if not isinstance(welcome, DecodeWelcome):
                raise unexpected(welcome)
        except BaseException:
            channel.abort()
            raise
        return DecodeConnection(welcome.worker, channel, self._config)


def _stacked(context: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.cpu() for each in context])

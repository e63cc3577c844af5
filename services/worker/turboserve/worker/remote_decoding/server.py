"""A decode worker: decodes the chunks of other workers' sessions, and keeps their decoders' caches.

It owns no session and publishes nothing. A cache belongs to a part of a video, not to an owner: the digest of
the last chunk that it has seen names it. A chunk that continues another one gets `NoCache`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from turboserve import logs
from turboserve.telemetry import tracer
from turboserve.telemetry_names import CHUNK_INDEX, PERIODIC, SESSION
from turboserve.worker import metrics
from turboserve.worker.engine.decode_jobs import CachedDecoder, DecodeJob
from turboserve.worker.engine.streams import DEVICE_LOST
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.remote_decoding.allotments import DividedSessions
from turboserve.worker.remote_decoding.chunk_time import ChunkTime
from turboserve.worker.remote_decoding.frames import (
    PURPOSE,
    Allotment,
    AskAllotment,
    ChunkFrames,
    DecodeChannel,
    DecodeChunk,
    DecodeHello,
    DecodeWelcome,
    NoCache,
    NoRoom,
    TensorSpec,
)
from turboserve.worker.transfer import handshake
from turboserve.worker.transfer.channel import ByteReader, ByteWriter, refuse, unexpected
from turboserve.worker.transfer.errors import (
    LayoutMismatchError,
    PeerLostError,
    TransferError,
    TransferProtocolError,
)
from turboserve.worker.transfer.half_open_connections import HalfOpenConnections

ADMIT_S = 3.0
"""Longest time until a peer has proved the key, seconds."""
ANSWER_S = 5.0
"""Longest time in which a worker takes its frames, seconds."""
END_S = 3.0
"""Longest time in which the connections end when the server does, seconds."""
QUIET_S = 86_400.0
"""Longest time without a chunk. A frozen worker sends none, and costs a connection."""
IDLE_S = 30.0
"""Time without a measured chunk after which the worker measures one, seconds."""
HANGS_S = 120.0
"""Time after which a decode ends the process, seconds: its device no longer computes."""

log = logs.get("decoding")
_trace = tracer("worker")
T = TypeVar("T")


class DecoderHangsError(RuntimeError):
    """A decode does not return. The process must be replaced."""


class DecodeServer:
    """Serves all connections of one decode worker. It decodes one chunk at a time, in order of arrival."""

    def __init__(
        self,
        worker: str,
        model: str,
        config: ModelConfig,
        decoder: CachedDecoder,
        key: bytes,
        now: Callable[[], float],
        time: ChunkTime,
        sessions: Callable[[float], int],
    ) -> None:
        """`model`: `state_fingerprint` of the weights. `key`: that the workers must prove. `time`: of a
        chunk. `sessions`: time of a chunk → sessions that the worker carries in real time."""
        self._worker, self._model, self._config = worker, model, config
        self._decoder, self._key, self._now = decoder, key, now
        self._context_limit = -(-config.window_frames // config.frames_per_chunk)
        self._time, self._sessions = time, sessions
        self._divided = DividedSessions(sessions(time.seconds))
        self._half_open = HalfOpenConnections(now=now)
        self._serving: dict[asyncio.Task[None], DecodeChannel] = {}
        self._turn = asyncio.Lock()
        # The first call of a thread sets its number of threads to the process's.
        self._thread = ThreadPoolExecutor(1, "decode", torch.get_num_threads)
        self._device_lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.decoded = 0
        self._measured_s = now()
        metrics.decode_sessions.set(self.sessions)

    @property
    def sessions(self) -> int:
        """Sessions that the worker carries in real time, by the newest measurements."""
        return self._divided.sessions

    async def measure_idle(self, probe: Callable[[], float]) -> None:
        """Measure the time of a chunk whenever none has been measured for `IDLE_S`, until canceled.

        Otherwise a worker that has become slow, and gets no chunks for that, would stay slow forever.
        `probe`: decodes, and returns the time of a chunk.
        """
        while True:
            measured_s = self._measured_s
            await asyncio.sleep(IDLE_S)
            if self._measured_s != measured_s:
                continue
            async with self._turn:
                seconds = await self._on_device(probe)
            self._measured(self._time.probed(seconds))

    def _measured(self, changed: bool) -> None:
        self._measured_s = self._now()
        if changed:
            self._divided.sessions = sessions = self._sessions(self._time.seconds)
            metrics.decode_sessions.set(sessions)
            log.info("time of a chunk changed", chunk_s=round(self._time.seconds, 4), sessions=sessions)

    async def run(self) -> None:
        """Wait until canceled. Raises the error of a failed device, and `DecoderHangsError`: the process has
        to end."""
        try:
            await self._device_lost
        finally:
            for channel in self._serving.values():
                channel.abort()
            if self._serving:
                await asyncio.wait([*self._serving], timeout=END_S)
            self._thread.shutdown(wait=False)

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
                    opened, _ = await handshake.admit(channel, self._key_of, ADMIT_S)
        except (TransferError, TimeoutError) as error:
            self._half_open.refused(channel.peer, error)
            return
        try:
            capacity = await self._welcome(channel)
            log.info("worker decodes here", worker=opened.worker)
            while True:
                question = await channel.next(QUIET_S)
                self._divided.heard(opened.worker, channel, capacity, self._now())
                if isinstance(question, AskAllotment):
                    sessions = self._divided.allotment(opened.worker, self._now())
                    answer = Allotment(sessions=sessions, carried=self.sessions)
                    await channel.post(answer, (), ANSWER_S)
                elif isinstance(question, DecodeChunk):
                    await self._answer(channel, question)
                else:
                    raise unexpected(question)
        except TransferError as error:
            log.info("worker left", worker=opened.worker, error=str(error))
            await refuse(channel, error.code, str(error))
        except DEVICE_LOST as error:
            if not self._device_lost.done():
                self._device_lost.set_exception(error)
        except Exception as error:
            # What one chunk raises ends its connection: the worker itself decodes it, and learns why.
            log.exception("chunk not decoded", worker=opened.worker)
            await refuse(channel, TransferError.code, repr(error))
        finally:
            self._divided.left(opened.worker, channel)

    def _hangs(self) -> None:
        if not self._device_lost.done():
            self._device_lost.set_exception(DecoderHangsError(f"a chunk has no frames after {HANGS_S:g} s"))

    def _key_of(self, purpose: str, number: int) -> bytes | None:
        return self._key if (purpose, number) == (PURPOSE, 0) else None

    async def _welcome(self, channel: DecodeChannel) -> int:
        """Answer a worker's first frame. Returns the worker's K."""
        hello = await channel.next(ADMIT_S)
        if not isinstance(hello, DecodeHello):
            raise unexpected(hello)
        if hello.model != self._model:
            raise LayoutMismatchError(f"model: {hello.model}, {self._model} is decoded here")
        await channel.post(DecodeWelcome(worker=self._worker), (), ADMIT_S)
        return hello.capacity

    async def _answer(self, channel: DecodeChannel, question: DecodeChunk) -> None:
        shape = self._config.latent_shape
        latents = await channel.payload(question.latents, shape, ANSWER_S)
        context: tuple[Tensor, ...] = ()
        if question.context is not None:
            count = question.context.shape[0] if question.context.shape else 0
            if not 1 <= count <= self._context_limit:
                raise TransferProtocolError(f"context: {count} chunks, at most {self._context_limit}")
            context = (await channel.payload(question.context, (count, *shape), ANSWER_S)).unbind(0)
        job = DecodeJob(question.session, question.index, latents, question.base, question.digest, context)
        found = await self._decoded(job, channel)
        if isinstance(found, Tensor):
            answer = ChunkFrames(number=question.number, frames=TensorSpec.of(found))
            await channel.post(answer, (found,), ANSWER_S)
        else:
            await channel.post(found(number=question.number), (), ANSWER_S)

    async def _decoded(self, job: DecodeJob, channel: DecodeChannel) -> Tensor | type[NoCache] | type[NoRoom]:
        """The chunk's frames, or what is missing. Raises `PeerLostError` if the worker has left meanwhile."""
        async with self._turn:
            if channel.left:
                # The worker no longer waits. To decode its chunk would delay those of the others.
                raise PeerLostError(f"chunk {job.index}: its worker has not waited")
            rebuilds = not self._decoder.has_cache(job)
            if rebuilds and not job.context:
                return NoCache
            if not self._decoder.caches.admits(job.session, self._now()):
                metrics.decodes_refused.add(1)
                return NoRoom
            attributes: dict[str, str | int | bool] = {SESSION: job.session, CHUNK_INDEX: job.index}
            with _trace.start_as_current_span("decode chunk", attributes={**attributes, PERIODIC: True}):
                began = self._now()
                frames = await self._on_device(partial(self._decoder.decode, job))
            seconds = self._now() - began
            metrics.decode_duration.record(seconds)
            if job.base is not None and not rebuilds:
                # A video's first chunk has fewer frames, and a rebuilt cache costs more than one decode.
                self._measured(self._time.observe(seconds))
            metrics.decoder_caches_rebuilt.add(rebuilds)
            self.decoded += 1
            return frames

    async def _on_device(self, call: Callable[[], T]) -> T:
        """Return the result of a call on the device's thread. One that hangs ends the process."""
        loop = asyncio.get_running_loop()
        hangs = loop.call_later(HANGS_S, self._hangs)
        try:
            return await loop.run_in_executor(self._thread, call)
        finally:
            hangs.cancel()

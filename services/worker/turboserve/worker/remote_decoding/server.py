"""A decode worker: decodes the chunks of other workers' sessions, and keeps their decoders' caches.

It owns no session and publishes nothing. A cache belongs to a part of a video, not to an owner: the digest of
the last chunk that it has seen names it. A chunk that continues another one gets `NoCache`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor

from turboserve import logs
from turboserve.telemetry import tracer
from turboserve.telemetry_names import BATCH_SIZE, CHUNK_INDEX, PERIODIC, SESSION
from turboserve.worker import metrics
from turboserve.worker.engine.decode_jobs import CachedDecoder, DecodeJob
from turboserve.worker.engine.gather import LatencyProfile
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
    DecodeFrame,
    NoCache,
    NoRoom,
    TensorSpec,
)
from turboserve.worker.remote_decoding.role_server import ANSWER_S, RoleServer
from turboserve.worker.remote_decoding.routing import SESSION_S
from turboserve.worker.transfer.channel import unexpected
from turboserve.worker.transfer.errors import PeerLostError, TransferProtocolError
from turboserve.worker.transfer.links import Links

IDLE_S = 30.0
"""Time without a measured chunk after which the worker measures one, seconds."""
log = logs.get("decoding")
_trace = tracer("worker")


@dataclass(eq=False)
class _Waiting:
    """A chunk that waits for its turn."""

    job: DecodeJob
    channel: DecodeChannel
    frames: Tensor | None = None
    """Set if it was decoded together with an earlier one."""


@dataclass(frozen=True)
class DecodeTimes:
    """What a decode worker knows of its times."""

    chunk: ChunkTime
    """Of one chunk alone."""
    sessions: Callable[[float], int]
    """Time of a chunk → sessions that the worker carries in real time."""
    batches: LatencyProfile | None = None
    """Time of some chunks together, by number, as measured at the start. None: each is decoded alone."""
    rows: int = 1
    """Largest number of chunks together: the memory has room for so many."""
    clock: Callable[[], float] = time.monotonic
    """That of all these times."""


class DecodeServer(RoleServer):
    """Serves all connections of one decode worker, in order of arrival.

    It decodes one chunk at a time, or those of several sessions that wait where that was measured to pay.
    """

    def __init__(
        self,
        worker: str,
        model: str,
        config: ModelConfig,
        decoder: CachedDecoder,
        key: bytes,
        now: Callable[[], float],
        times: DecodeTimes,
        thread: Executor | None = None,
        links: Links | None = None,
    ) -> None:
        """`model`: `state_fingerprint` of the weights. `key`: that the workers must prove. `thread`: see
        `RoleServer`. `links`: over which payloads pass where both ends can. The server closes them."""
        super().__init__(PURPOSE, worker, model, key, now, thread, links)
        self._config, self._decoder = config, decoder
        self._context_limit = -(-config.window_frames // config.frames_per_chunk)
        self._times = times
        self._divided = DividedSessions(times.sessions(times.chunk.seconds), worker)
        self._rows = times.rows
        self._waiting: list[_Waiting] = []
        self.decoded = 0
        """Number of chunks."""
        self.decodes = 0
        """Number of decodes. Each has one chunk or more."""
        self._measured_s = now()
        metrics.decode_sessions.set(self.sessions)

    @property
    def sessions(self) -> int:
        """Sessions that the worker carries in real time, by the newest measurements."""
        return self._divided.sessions

    async def measure_idle(self, probe: Callable[[], float], times: int) -> None:
        """Measure the time of a chunk whenever none has been measured for `IDLE_S`, until canceled.

        Otherwise a worker that has become slow, and gets no chunks for that, would stay slow forever.
        `probe`: decodes, and returns the time of a chunk. The fastest of so many `times` counts.
        """
        while True:
            measured_s = self._measured_s
            await asyncio.sleep(IDLE_S)
            if self._measured_s != measured_s:
                continue
            seconds: list[float] = []
            try:
                for _ in range(times):
                    # A chunk waits for one probe at most. All together may take as long as its home waits.
                    async with self._turn:
                        seconds.append(await self._on_device(probe))
            except DEVICE_LOST:
                raise
            except Exception:
                log.exception("time of a chunk not measured")
                continue
            self._measured(self._times.chunk.probed(min(seconds)))

    def _measured(self, changed: bool) -> None:
        self._measured_s = self._now()
        if changed:
            self._divided.sessions = sessions = self._times.sessions(self._times.chunk.seconds)
            metrics.decode_sessions.set(sessions)
            log.info(
                "time of a chunk changed", chunk_s=round(self._times.chunk.seconds, 4), sessions=sessions
            )

    async def _question(
        self, channel: DecodeChannel, worker: str, capacity: int, question: DecodeFrame
    ) -> None:
        """See `RoleServer._question`."""
        self._divided.heard(worker, channel, capacity, self._now())
        if isinstance(question, AskAllotment):
            sessions = self._divided.allotment(worker, self._now())
            used = self._decoder.caches.used(self._now(), SESSION_S)
            await channel.post(Allotment(sessions=sessions, carried=self.sessions, used=used), (), ANSWER_S)
        elif isinstance(question, DecodeChunk):
            await self._answer(channel, question)
        else:
            raise unexpected(question)

    def _left(self, worker: str, channel: DecodeChannel) -> None:
        """See `RoleServer._left`."""
        self._divided.left(worker, channel)

    async def _answer(self, channel: DecodeChannel, question: DecodeChunk) -> None:
        shape = self._config.latent_shape
        wanted: list[tuple[TensorSpec, tuple[int, ...]]] = [(question.latents, shape)]
        if question.context is not None:
            count = question.context.shape[0] if question.context.shape else 0
            if not 1 <= count <= self._context_limit:
                raise TransferProtocolError(f"context: {count} chunks, at most {self._context_limit}")
            wanted.append((question.context, (count, *shape)))
        latents, *before = await channel.payloads(wanted, ANSWER_S)
        context = tuple(chunk for part in before for chunk in part.unbind(0))
        job = DecodeJob(question.session, question.index, latents, question.base, question.digest, context)
        found = await self._decoded(job, channel)
        if isinstance(found, Tensor):
            answer = ChunkFrames(number=question.number, frames=TensorSpec.of(found))
            await channel.post(answer, (found,), ANSWER_S)
        else:
            await channel.post(found(number=question.number), (), ANSWER_S)

    async def _decoded(self, job: DecodeJob, channel: DecodeChannel) -> Tensor | type[NoCache] | type[NoRoom]:
        """The chunk's frames, or what is missing. Raises `PeerLostError` if the worker has left meanwhile."""
        own = _Waiting(job, channel)
        self._waiting.append(own)
        try:
            async with self._turn:
                return await self._in_turn(own) if own.frames is None else own.frames
        finally:
            self._waiting.remove(own)

    async def _in_turn(self, own: _Waiting) -> Tensor | type[NoCache] | type[NoRoom]:
        job = own.job
        if own.channel.left:
            # The worker no longer waits. To decode its chunk would delay those of the others.
            raise PeerLostError(f"chunk {job.index}: its worker has not waited")
        rebuilds = not self._decoder.has_cache(job)
        if rebuilds and not job.context:
            return NoCache
        if not self._decoder.caches.admits(job.session, self._now()):
            metrics.decodes_refused.add(1)
            return NoRoom
        attributes = {SESSION: job.session, CHUNK_INDEX: job.index, PERIODIC: True}
        with _trace.start_as_current_span("decode chunk", attributes=attributes) as span:
            if others := self._others(own):
                span.set_attribute(BATCH_SIZE, 1 + len(others))
                await self._together([own, *others])
            if own.frames is None:
                own.frames = await self._alone(job, counts=job.base is not None and not rebuilds)
        metrics.decoder_caches_rebuilt.add(rebuilds)
        return own.frames

    async def _alone(self, job: DecodeJob, *, counts: bool) -> Tensor:
        """Decode one chunk. `counts`: whether its time is that of every chunk.

        A video's first chunk has fewer frames, and a rebuilt cache costs more than one decode.
        """
        began = self._now()
        frames, seconds = await self._on_device(lambda: self._timed(lambda: self._decoder.decode(job)))
        metrics.decode_duration.record(self._now() - began)
        if counts:
            self._measured(self._times.chunk.observe(seconds))
        self.decoded += 1
        self.decodes += 1
        return frames

    async def _together(self, batch: Sequence[_Waiting]) -> None:
        """Decode several chunks at once. Without a result, each is decoded alone: one may be the cause."""
        began = self._now()
        try:
            found = await self._on_device(lambda: self._decoder.decode_together([each.job for each in batch]))
        except DEVICE_LOST:
            raise
        except torch.OutOfMemoryError:
            # Each attempt takes time that the chunks one by one need.
            self._rows = len(batch) // 2
            log.warning("no memory for chunks together", chunks=len(batch), from_now_on=self._rows)
            return
        except Exception:
            log.exception("chunks not decoded together", chunks=len(batch))
            return
        seconds = self._now() - began
        self.decodes += 1
        for each, frames in zip(batch, found, strict=True):
            metrics.decode_duration.record(seconds)
            self.decoded += 1
            each.frames = frames

    def _others(self, first: _Waiting) -> list[_Waiting]:
        """The waiting chunks that are decoded together with the first one: those of other sessions that
        continue caches that are here, as many as pay."""
        batches = self._times.batches
        if batches is None or not self._continues(first.job):
            return []
        fitting = {first.job.session: first}
        for each in self._waiting:
            alike = each.job.latents.dtype == first.job.latents.dtype and self._continues(each.job)
            if alike and each.frames is None and not each.channel.left:
                fitting.setdefault(each.job.session, each)
        count = batches.paying_batch(min(self._rows, len(fitting)))
        return [*fitting.values()][1:count]

    def _continues(self, job: DecodeJob) -> bool:
        return job.base is not None and self._decoder.has_cache(job)

    def _timed(self, call: Callable[[], Tensor]) -> tuple[Tensor, float]:
        began = self._times.clock()
        found = call()
        return found, self._times.clock() - began

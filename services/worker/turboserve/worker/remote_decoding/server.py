"""A decode worker: decodes the chunks of other workers' sessions, and keeps their decoders' caches.

It owns no session and publishes nothing. A cache belongs to a part of a video, not to an owner: the digest of
the last chunk that it has seen names it. A chunk that continues another one gets `NoCache`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

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
    DecodeFrame,
    NoCache,
    NoRoom,
    TensorSpec,
)
from turboserve.worker.remote_decoding.role_server import ANSWER_S, RoleServer
from turboserve.worker.remote_decoding.routing import SESSION_S
from turboserve.worker.transfer.channel import unexpected
from turboserve.worker.transfer.errors import (
    PeerLostError,
    TransferProtocolError,
)

IDLE_S = 30.0
"""Time without a measured chunk after which the worker measures one, seconds."""
log = logs.get("decoding")
_trace = tracer("worker")


class DecodeServer(RoleServer):
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
        thread: Executor | None = None,
    ) -> None:
        """`model`: `state_fingerprint` of the weights. `key`: that the workers must prove. `time`: of a
        chunk. `sessions`: time of a chunk → sessions that the worker carries in real time. `thread`: see
        `RoleServer`."""
        super().__init__(PURPOSE, worker, model, key, now, thread)
        self._config, self._decoder = config, decoder
        self._context_limit = -(-config.window_frames // config.frames_per_chunk)
        self._time, self._sessions = time, sessions
        self._divided = DividedSessions(sessions(time.seconds), worker)
        self.decoded = 0
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
            self._measured(self._time.probed(min(seconds)))

    def _measured(self, changed: bool) -> None:
        self._measured_s = self._now()
        if changed:
            self._divided.sessions = sessions = self._sessions(self._time.seconds)
            metrics.decode_sessions.set(sessions)
            log.info("time of a chunk changed", chunk_s=round(self._time.seconds, 4), sessions=sessions)

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

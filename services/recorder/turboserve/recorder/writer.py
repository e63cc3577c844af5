"""Writes one recording: from the chunk log to object storage, one segment after the other.

Nothing is remembered elsewhere. At its start, a writer lists what is stored and goes on behind it. Chunks
that were read and not stored are read from the log again. So the process may be killed at any step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

from turboserve import logs
from turboserve.backoff import backoff_s
from turboserve.bus import Bus
from turboserve.bus.chunk_log import Chunk, ChunkLog
from turboserve.clock import Clock
from turboserve.contracts.errors import (
    ChunkGoneError,
    NotFoundError,
    SessionNotFoundError,
    TurboServeError,
)
from turboserve.contracts.recordings import RecordingOrder, ReportRecording
from turboserve.contracts.requests import SessionRef
from turboserve.contracts.sessions import SessionRecord
from turboserve.recorder import metrics
from turboserve.recorder.core.batching import Batch, LogChunk, NewSegment, SegmentLimits
from turboserve.recorder.core.segments import Index, init_name
from turboserve.recorder.storage import Storage, StorageError
from turboserve.recording_subjects import REPORT_RECORDING
from turboserve.subjects import GET_SESSION
from turboserve.tasks import or_silence

TICK_S = 0.5
"""Interval at which a writer looks for what no chunk tells: a stop, an old unfinished segment."""
RETRY_S = 0.5
LONGEST_RETRY_S = 10.0

log = logs.get("writer")


class StoppedError(Exception):
    """The writer is to end before its recording is complete."""


def folder_of(tenant: str, recording: str) -> str:
    """Return the folder of a recording's objects."""
    return f"{tenant}/{recording}"


class RecordingWriter:
    """Runs from the first order for a recording until nothing is left to store, or until `stop`."""

    def __init__(
        self,
        order: RecordingOrder,
        bus: Bus,
        chunks: ChunkLog,
        storage: Storage,
        limits: SegmentLimits,
        clock: Clock,
    ) -> None:
        self.order = order
        self._bus, self._chunks, self._storage, self._clock = bus, chunks, storage, clock
        self._limits = limits
        self._folder = folder_of(order.tenant, order.recording)
        self._ended, self._stopping = asyncio.Event(), asyncio.Event()
        self._index, self._inits = Index(), set[str]()
        self._batch = Batch(order.from_chunk, limits)
        self._reported = False
        self.update(order)

    def update(self, order: RecordingOrder) -> None:
        """Take over a newer order for the same recording."""
        self.order = order
        if order.session_ended:
            self._ended.set()

    def stop(self) -> None:
        """End as soon as possible. A request to object storage that is under way is not interrupted."""
        self._stopping.set()

    @property
    def behind(self) -> int:
        """Number of chunks that the session has made and that are not stored."""
        made = self.order.made if self.order.until_chunk is None else self.order.until_chunk
        return max(0, made - self._stored_to)

    @property
    def _stored_to(self) -> int:
        return self.order.from_chunk if self._index.end is None else self._index.end

    async def run(self) -> None:
        """Store the recording, and report it as complete."""
        try:
            await self._load()
            position = self._batch.next_chunk
            while not self._over():
                try:
                    await self._follow(position)
                    break
                except ChunkGoneError as gone:
                    position = await self._skip(int(gone.limit or 0))
                except SessionNotFoundError:
                    break
                except TurboServeError as error:
                    log.info("log not read", recording=self.order.recording, error=error.detail)
                    position = self._batch.next_chunk
                await self._pause(RETRY_S)
            await self._store(self._batch.take())
            await self._report(complete=True)
        except StoppedError:
            return

    async def _load(self) -> None:
        failures = 0
        while True:
            try:
                found = await self._storage.listing(self._folder)
                break
            except StorageError as error:
                failures += 1
                await self._failed("objects not listed", error, failures)
        self._index = Index.of(found)
        self._inits = {name for name, _ in found}
        self._batch = Batch(max(self._stored_to, self.order.from_chunk), self._limits)
        if self._index.segments:
            log.info("recording goes on", recording=self.order.recording, chunk=self._stored_to)
            await self._report()

    async def _follow(self, position: int) -> None:
        """Store chunks from `position` on, until the session has ended or nothing is left to store."""
        record = await self._session()
        if record.phase.ended:
            self._ended.set()
        start = await self._chunks.after(record, position - 1)
        source = self._chunks.follow(self.order.session, start, self._ended, self._made)
        async with aclosing(or_silence(source, TICK_S)) as found:
            async for chunk in found:
                if chunk is not None:
                    await self._store(self._batch.add(_log_chunk(chunk), self._clock.monotonic()))
                if self._over():
                    return
                if self._batch.is_due(self._clock.monotonic()):
                    await self._store(self._batch.take())
                elif not self._reported and self._index.segments:
                    await self._report()

    async def _skip(self, kept: int) -> int:
        """Go on behind chunks that the log has lost. `kept`: the next one that it has."""
        until = self.order.until_chunk
        target = kept if until is None else min(kept, until)
        missing = target - self._batch.next_chunk
        if missing > 0:
            log.warning(
                "the log dropped chunks before they were stored",
                recording=self.order.recording,
                session=self.order.session,
                first=self._batch.next_chunk,
                chunks=missing,
            )
            metrics.chunks_missing.add(missing)
            await self._store(self._batch.skip_to(target))
        # A log that has lost its end continues below what is stored already; `Batch` ignores these chunks.
        return kept

    def _over(self) -> bool:
        if self._stopping.is_set():
            raise StoppedError
        until = self.order.until_chunk
        return until is not None and self._batch.next_chunk >= until

    async def _store(self, segments: Sequence[NewSegment]) -> None:
        for new in segments:
            await self._put(init_name(new.init), new.init)
            await self._put(new.segment.name, new.data)
            self._index = self._index.and_segment(new.segment)
            metrics.chunks.add(new.segment.chunks)
            metrics.stored.add(new.segment.size)
            await self._report()

    async def _put(self, name: str, data: bytes) -> None:
        """Store an object, however long it takes. Meanwhile nothing is read: the log keeps what comes."""
        if name in self._inits:
            return
        failures = 0
        while True:
            started = self._clock.monotonic()
            try:
                await self._storage.put(f"{self._folder}/{name}", data)
                break
            except StorageError as error:
                failures += 1
                await self._failed("segment not stored", error, failures)
        metrics.put_duration.record(self._clock.monotonic() - started)
        self._inits.add(name)

    async def _failed(self, what: str, error: StorageError, failures: int) -> None:
        """Wait before the next attempt, after `failures` failures in a row."""
        metrics.storage_failures.add(1)
        log.warning(what, recording=self.order.recording, behind=self.behind, error=error.detail)
        await self._pause(backoff_s(failures, RETRY_S, LONGEST_RETRY_S))

    async def _report(self, complete: bool = False) -> None:
        """Report what is stored. A report that is lost is repeated."""
        index = self._index
        reached = self._batch.next_chunk if complete else self._stored_to
        missing = reached - self.order.from_chunk - index.chunks if index.segments else 0
        report = ReportRecording(
            recording=self.order.recording,
            next_chunk=max(reached, self._stored_to),
            chunks=index.chunks,
            missing_chunks=max(0, missing),
            bytes=index.bytes,
            duration_s=index.duration_s,
            parts=len(index.parts),
            complete=complete,
        )
        self._reported = False
        try:
            await self._bus.call(REPORT_RECORDING, report)
        except NotFoundError:
            raise StoppedError from None
        except TurboServeError as error:
            # The next listing shows an open recording again, so nothing is forgotten.
            log.info("report lost", recording=self.order.recording, error=error.detail)
            return
        self._reported = True

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return
        raise StoppedError

    async def _session(self) -> SessionRecord:
        return await self._bus.call(GET_SESSION, SessionRef(session=self.order.session))

    async def _made(self) -> int:
        return (await self._session()).next_chunk


def _log_chunk(chunk: Chunk) -> LogChunk:
    header = chunk.header
    return LogChunk(
        index=header.index,
        first_frame=header.first_frame,
        frames=header.frames,
        fps=header.fps,
        init=chunk.init,
        fragment=chunk.fragment,
    )

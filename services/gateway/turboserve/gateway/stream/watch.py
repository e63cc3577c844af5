"""One viewer of one session: its chunks, its events and its entry on the timeline."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from types import TracebackType
from typing import Self

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind

from turboserve import logs
from turboserve.bus.chunk_log import Chunk, StreamStart
from turboserve.contracts.errors import SessionNotFoundError, TransitionError, TurboServeError
from turboserve.contracts.events import SessionEvent
from turboserve.contracts.sessions import Activity, SessionRecord
from turboserve.gateway import metrics
from turboserve.gateway.context import Gateway
from turboserve.gateway.events.session_events import follow_events
from turboserve.ids import new_id
from turboserve.telemetry import context_from, is_sampled, tracer
from turboserve.telemetry_names import CHUNK_INDEX, SESSION, VIEWER

_trace = tracer("gateway")

WAKE_RETRIES_S = (0.0, 0.5, 1.0, 2.0, 4.0)
WAKE_AGAIN_S = 8.0
"""Seconds between later attempts to resume an idle session, while the viewer stays: only viewers do it."""

log = logs.get("stream")
_NO_SPAN = nullcontext(INVALID_SPAN)


async def until_decided(
    tasks: set[asyncio.Task[object]], events: asyncio.Task[object]
) -> set[asyncio.Task[object]]:
    """Wait for the first of `tasks` that decides the end of a stream, and raise its error.

    `events` is one of them, and decides only by an error: the events of an ended session may be sent before
    its video. Returns the tasks that are done.
    """
    deciding = set(tasks)
    while True:
        done, deciding = await asyncio.wait(deciding, return_when=asyncio.FIRST_COMPLETED)
        if done != {events} or events.exception() is not None:
            break
    for task in done:
        task.result()
    return done


class DeliverySpans:
    """The spans of one viewer."""

    def __init__(self, viewer: str) -> None:
        self._viewer = viewer
        self._first: tuple[int, str | None, int] | None = None
        """Index and trace context of the first chunk that was sent, and when it was, Unix ns."""

    def deliver(self, chunk: Chunk) -> AbstractContextManager[Span]:
        """Return the span within which `chunk` is sent. Only sampled chunks have one."""
        if self._first is None:
            self._first = chunk.header.index, chunk.traceparent, time.time_ns()
        if not is_sampled(chunk.traceparent):
            return _NO_SPAN
        return _trace.start_as_current_span(
            "deliver chunk",
            context=context_from(chunk.traceparent),
            kind=SpanKind.CONSUMER,
            attributes={
                "messaging.system": "nats",
                "messaging.destination.template": "chunk.{id}",
                "messaging.operation.name": "deliver",
                "messaging.operation.type": "process",
                SESSION: chunk.header.session,
                CHUNK_INDEX: chunk.header.index,
                VIEWER: self._viewer,
            },
            # A viewer who leaves is no error.
            notes_errors=False,
        )

    @property
    def first(self) -> int | None:
        """Index of the first chunk that was sent. None: none yet."""
        return None if self._first is None else self._first[0]

    def shown(self, session: str) -> None:
        """The viewer shows its first frame. Later calls do nothing."""
        if self._first is None:
            return
        index, traceparent, sent_at = self._first
        self._first = index, None, sent_at
        if not is_sampled(traceparent):
            return
        span = _trace.start_span(
            "show first frame",
            context=context_from(traceparent),
            start_time=sent_at,
            attributes={
                SESSION: session,
                CHUNK_INDEX: index,
                VIEWER: self._viewer,
            },
        )
        span.end()


async def place_of_viewer(
    gateway: Gateway, tenant: str, session: str, after: int | None
) -> tuple[SessionRecord, StreamStart]:
    """Return the session's row, and the start for a viewer that has chunk `after`.

    `after` None: the viewer starts at the playhead, or of an ended session at the oldest chunk that is kept.
    Raises the errors of `Sessions.get` and `ChunkLog`.
    """
    gateway.sessions.check_id(session)
    record = await gateway.sessions.get_or_remembered(tenant, session)
    if after is not None:
        return record, await gateway.chunks.after(record, after)
    if record.phase.ended:
        return record, await gateway.chunks.at(record, 0.0)
    view = gateway.timeline.view(session)
    # The row includes the viewers of other gateways. The timeline is newer.
    playhead_s = record.playhead_s if view is None else max(record.playhead_s, view.playhead_s)
    return record, await gateway.chunks.at(record, playhead_s)


class Watch:
    """Async context of a viewer, which is on the timeline from enter to exit. Resumes an idle session.

    Follows the events with a number above `events_after`; None: above the newest event of `record`.
    """

    def __init__(
        self,
        gateway: Gateway,
        record: SessionRecord,
        start: StreamStart,
        *,
        self_paced: bool,
        events_after: int | None = None,
        on_event: Callable[[SessionEvent], Awaitable[None]] | None = None,
    ) -> None:
        self.record = record
        self.start = start
        self.viewer = new_id("view")
        self.last = start.index - 1
        """Index of the newest chunk that was sent."""
        self.spans = DeliverySpans(self.viewer)
        self.ended = asyncio.Event()
        self._gateway = gateway
        self.events_after = record.event_sequence if events_after is None else events_after
        self._history = self.events_after < record.event_sequence
        self._self_paced = self_paced
        self._on_event = on_event
        self._joined_at = gateway.clock.wall()
        self._waking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._gateway.timeline.joined(
                self.record.id,
                self.viewer,
                self.start.start_s,
                self_paced=self._self_paced,
                made_s=self.start.made_s,
                reached_s=self.record.playhead_s,
            )
            await self._learn(self.record)
        except BaseException:
            # A viewer that stayed counted would keep its session from ever becoming idle.
            await self._gateway.timeline.left(self.record.id, self.viewer)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._waking is not None:
            self._waking.cancel()
        await self._gateway.timeline.left(self.record.id, self.viewer)

    def chunks(self) -> AsyncGenerator[Chunk, None]:
        """Yield the viewer's chunks until the session has ended and is read out: see ChunkLog.follow."""
        return self._gateway.chunks.follow(self.record.id, self.start, self.ended, self._made)

    async def _made(self) -> int:
        return (await self._gateway.sessions.get(self.record.tenant, self.record.id)).next_chunk

    async def events(self) -> None:
        """Follow the session's events until it ends. If it has ended, read only the history asked for."""
        if self.ended.is_set() and not self._history:
            return
        async with aclosing(follow_events(self._gateway.bus, self.record.id, self.events_after)) as coming:
            async for event in coming:
                if self._on_event is not None:
                    await self._on_event(event)
                if event.record.version >= self.record.version:
                    await self._learn(event.record)

    async def sent(self, chunk: Chunk, size: int) -> None:
        """Note that `chunk` was sent to the viewer, `size` bytes of video."""
        header = chunk.header
        self.last = header.index
        metrics.chunks.add(1)
        metrics.video.add(size)
        if header.published_at >= self._joined_at:
            metrics.delivery_duration.record(max(0.0, self._gateway.clock.wall() - header.published_at))
        if header.index == 0:
            self._gateway.sessions.first_chunk_sent(header.session)
        await self._gateway.timeline.delivered(self.viewer, header, size)

    def shown(self) -> None:
        """Note that the viewer shows its first frame."""
        self.spans.shown(self.record.id)
        if self.spans.first is not None:
            self._gateway.timeline.shown(self.record.id, self.spans.first)

    async def skipped(self, start_s: float) -> None:
        """Note that the viewer discards the video before media time `start_s`."""
        await self._gateway.timeline.skipped(self.record.id, self.viewer, start_s)

    async def _learn(self, record: SessionRecord) -> None:
        self.record = self._gateway.sessions.remember(record)
        watching = record.activity is Activity.WATCHING and not record.phase.ended
        await self._gateway.timeline.playing(record.id, watching)
        if record.phase.ended:
            self.ended.set()
        elif record.activity is Activity.IDLE and (self._waking is None or self._waking.done()):
            self._waking = asyncio.create_task(self._wake())

    async def _wake(self) -> None:
        for pause_s in itertools.chain(WAKE_RETRIES_S, itertools.repeat(WAKE_AGAIN_S)):
            await asyncio.sleep(pause_s)
            if self.record.activity is not Activity.IDLE or self.ended.is_set():
                return
            try:
                await self._gateway.sessions.resume(self.record.tenant, self.record.id)
                return
            except (SessionNotFoundError, TransitionError) as error:
                log.info("idle session not resumed", session=self.record.id, problem=error.detail)
                return
            except TurboServeError as error:
                log.info("idle session not resumed", session=self.record.id, problem=error.detail)

"""Serves one WebRTC viewer: paces its video, sends events, takes controls, ends with its session or key."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import aclosing

from cachetools import FIFOCache
from opentelemetry.context import Context

from turboserve import logs
from turboserve.bus.chunk_log import Chunk, StreamStart
from turboserve.contracts.errors import ChunkGoneError, TurboServeError, UnauthorizedError
from turboserve.contracts.events import SessionEvent
from turboserve.contracts.public_events import public_event
from turboserve.contracts.sessions import SessionRecord
from turboserve.gateway import metrics
from turboserve.gateway.auth.access import Identity
from turboserve.gateway.auth.revocable import ENDED
from turboserve.gateway.context import Gateway
from turboserve.gateway.ice_servers import IceServer, own_addresses
from turboserve.gateway.stream import protocol
from turboserve.gateway.stream.requests import (
    OutgoingMessage,
    TooManyBadMessagesError,
    ViewerRequests,
    init_message,
    skip_message,
    skips,
)
from turboserve.gateway.stream.watch import Watch, until_decided
from turboserve.gateway.whep.access_units import AccessUnit, ChunkFormatError, access_units
from turboserve.gateway.whep.announcements import Announcements
from turboserve.gateway.whep.connection import ViewerConnection
from turboserve.gateway.whep.frame_sender import FrameSender
from turboserve.gateway.whep.frame_times import FrameTimes
from turboserve.gateway.whep.offer import CheckedOffer
from turboserve.gateway.whep.pacing import PacedFrame, Pacer
from turboserve.gateway.whep.rtp_stream import RTP_CLOCK
from turboserve.tasks import stop
from turboserve.telemetry import links_to, traceparent, within

CONNECT_S = 15.0
"""Time in which a viewer must connect after the answer, seconds."""
AHEAD_S = 12.0
"""Media that waits here for its time at most, seconds. The rest waits in the log."""
UNREAD_BYTES = 1 << 20
"""Messages that a viewer has not acknowledged, bytes. With more, its connection ends."""
LAST_MESSAGE_S = 1.0
"""Time for which the end of a connection waits until its last message is acknowledged, seconds."""

CHUNKS_KEPT = 256
"""Chunks of which is kept what their viewers share."""
MESSAGES_KEPT = 64
"""Messages that wait for a data channel at most. Of more, the oldest are dropped."""

log = logs.get("whep")
_shared: FIFOCache[tuple[str, int], tuple[tuple[AccessUnit, ...], str]] = FIFOCache(CHUNKS_KEPT)


def _shared_of(chunk: Chunk) -> tuple[tuple[AccessUnit, ...], str]:
    """Return what viewers of one session share of a chunk: its access units, and its announcement as JSON.

    The announcement has no `rtp_time`, which each viewer has of its own. Raises ChunkFormatError.
    """
    key = chunk.header.session, chunk.sequence
    if key not in _shared:
        announcement = protocol.ChunkMessage.text_of(chunk.header, len(chunk.fragment))
        _shared[key] = access_units(chunk.init, chunk.fragment), announcement
    return _shared[key]


class Peer:
    """One viewer over WebRTC, from its offer until it leaves."""

    def __init__(
        self,
        gateway: Gateway,
        identity: Identity,
        record: SessionRecord,
        start: StreamStart,
        path: str,
        servers: tuple[IceServer, ...],
        events_after: int | None,
        times: FrameTimes,
    ) -> None:
        """`path`: that of the request, which problems name. `times`: those of all viewers."""
        self.tenant, self.session = record.tenant, record.id
        self.leaving = asyncio.Event()
        """Set to end the connection, as the viewer asked for."""
        self._gateway, self._identity, self._record, self._start = gateway, identity, record, start
        self._pacer = Pacer(gateway.settings.whep_buffer_s, gateway.settings.whep_window_s)
        self._frames = FrameSender(self._pacer, gateway.clock, times, self._begins)
        self._connection = ViewerConnection(self._frames, servers, gateway.clock, times)
        self._watch = Watch(
            gateway, record, start, self_paced=False, events_after=events_after, on_event=self._event
        )
        self._requests = ViewerRequests(gateway, identity, self._watch, self._send, path, reports=False)
        self._coming: dict[int, tuple[Chunk, str]] = {}
        """Chunks of which no frame was sent, by index, each with the announcement for its first frame."""
        self._waiting: deque[str] | None = deque(maxlen=MESSAGES_KEPT)
        """Messages that wait for the data channel, since video may come before. None: they need not wait."""
        self._announcements = Announcements()
        self._init: bytes | None = None
        self._cut = asyncio.Event()
        """Set when a check ends the connection."""
        self._problem: Exception | None = None
        """Why it does. None: the viewer does not read."""
        self._unread_since: float | None = None
        self._messages = False

    async def answer(self, offer: CheckedOffer) -> str:
        """Return the answer to `offer`. Raises InvalidOfferError."""
        self._messages = offer.messages
        if not offer.messages:
            self._waiting = None
        return await self._connection.answer(offer, own_addresses(self._gateway.settings.gateway_host))

    async def serve(self) -> None:
        """Serve the viewer until it leaves, the session or its key ends, or viewers are sent on."""
        self._requests.links = links_to(traceparent())
        with within(Context()):
            try:
                async with self._watch:
                    self._choose_window()
                    await self._serve()
            except TurboServeError as error:
                log.info("viewer not served", session=self.session, problem=error.detail)
            finally:
                await self.close()

    async def close(self) -> None:
        self._cut.set()
        self._frames.stop()
        await self._connection.close()

    async def _serve(self) -> None:
        tasks: set[asyncio.Task[object]] = {
            asyncio.create_task(one)
            for one in (
                self._video(),
                self._listen(),
                self._until_cut(),
                self._connection.gone.wait(),
                self.leaving.wait(),
                self._gateway.streams.until_sent_on(),
            )
        }
        events = asyncio.create_task(self._events())
        tasks.add(events)
        try:
            await until_decided(tasks, events)
        except TooManyBadMessagesError:
            log.info("viewer sent too many bad messages", session=self.session)
        except ChunkFormatError as error:
            log.warning("chunk not sent over WebRTC", session=self.session, error=str(error))
        except TurboServeError as error:
            if isinstance(error, ChunkGoneError):
                metrics.gaps.add(1)
            await self._requests.problem(error)
        finally:
            await stop(*tasks)
            self._frames.stop()
        if not self._connection.gone.is_set():
            await self._flush()

    def _choose_window(self) -> None:
        """Send frames less often while the session has a viewer here that came earlier."""
        settings = self._gateway.settings
        window_s = settings.whep_window_s
        if self._gateway.timeline.oldest_viewer(self.session) != self._watch.viewer:
            window_s = max(window_s, settings.whep_shared_window_s)
        self._pacer.window_s = window_s

    async def _video(self) -> None:
        """Queue chunks, and return when all of an ended session were sent."""
        await self._connection.connected.wait()
        async with aclosing(self._watch.chunks()) as chunks:
            async for chunk in chunks:
                await self._queue(chunk)
                while self._pacer.queued_s > AHEAD_S:
                    await asyncio.sleep(AHEAD_S / 24)
        await self._frames.dry.wait()
        # The last frames are due up to a window after they were sent.
        now = self._gateway.clock.monotonic()
        await asyncio.sleep(max(0.0, self._pacer.end_s - self._pacer.playhead_s(now)))
        await self._send(self._requests.end())

    async def _queue(self, chunk: Chunk) -> None:
        header = chunk.header
        units, announcement = _shared_of(chunk)
        skip = skips(chunk, self._record)
        with self._watch.spans.deliver(chunk):
            if skip:
                self._coming.clear()
                await self._send(skip_message(chunk))
                await self._watch.skipped(header.start_s)
            self._coming[header.index] = chunk, announcement
            self._pacer.add(header.index, units, self._gateway.clock.monotonic(), skip=skip)
            self._frames.queued(skip=skip)
            await self._watch.sent(chunk, len(chunk.fragment))

    def _begins(self, frame: PacedFrame) -> None:
        """Announce the chunk of which this is the first frame."""
        chunk, announcement = self._coming.pop(frame.chunk.index, (None, ""))
        if chunk is None or not self._messages:
            return
        if chunk.init != self._init:
            self._init = chunk.init
            self._say(init_message(chunk).text())
        text = f'{announcement[:-1]},"rtp_time":{round(frame.presentation_s * RTP_CLOCK)}}}'
        now = self._gateway.clock.monotonic()
        if self._announcements.add(text, chunk.header, frame.presentation_s, now):
            self._say()

    async def _listen(self) -> None:
        await self._connection.opened.wait()
        waiting, self._waiting = self._waiting or (), None
        self._connection.send(self._requests.hello(self._record, self._start).text(), *waiting)
        while True:
            await self._requests.handle(await self._connection.messages.get())

    async def _events(self) -> None:
        if self._messages:
            await self._connection.opened.wait()
        await self._watch.events()

    async def _until_cut(self) -> None:
        """Return if the viewer has not connected, and if a check ends the connection. Raises its problem."""
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._connection.connected.wait()
        except TimeoutError:
            log.info("viewer has not connected", session=self.session)
            return
        await self.check()
        await self._cut.wait()
        if self._problem is not None:
            raise self._problem

    async def check(self) -> None:
        """Report the playhead. End the connection if the viewer's key has ended, and if it does not read."""
        if not self._connection.connected.is_set() or self._cut.is_set():
            return
        try:
            await self._check(self._gateway.clock.monotonic())
        except Exception as error:
            # It ends this connection alone: the checks of other viewers follow.
            self._problem = error
            self._cut.set()

    async def _check(self, now: float) -> None:
        self._choose_window()
        await self._report(now)
        if self._announcements.are_due(now):
            self._say()
        waiting, since = self._connection.waiting_bytes, self._unread_since
        self._unread_since = since = None if not waiting else since or now
        late = since is not None and now - since > self._gateway.settings.write_timeout_s
        if late or waiting > UNREAD_BYTES or self._connection.flooded.is_set():
            log.info("viewer cut", session=self.session, unread_bytes=waiting)
            self._cut.set()
            return
        self._connection.check()

    async def _report(self, now: float) -> None:
        """Report the playhead. Raises UnauthorizedError if the viewer's key or link has ended."""
        checked = bool(self._gateway.keys) or self._identity.grant is not None
        if checked and not self._gateway.authenticator.holds(self._identity):
            raise UnauthorizedError(ENDED, field="Authorization")
        playhead_s = self._pacer.playhead_s(now)
        await self._gateway.timeline.reported(
            self.session, self._watch.viewer, playhead_s, max(0.0, self._pacer.end_s - playhead_s)
        )

    async def _flush(self) -> None:
        deadline = self._gateway.clock.monotonic() + LAST_MESSAGE_S
        while self._connection.waiting_bytes and self._gateway.clock.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def _event(self, event: SessionEvent) -> None:
        await self._send(public_event(event))

    async def _send(self, message: OutgoingMessage) -> None:
        self._say(message.text())

    def _say(self, *texts: str) -> None:
        """Send messages, after the announcements that wait."""
        texts = *self._announcements.take(), *texts
        if self._waiting is None:
            self._connection.send(*texts)
        else:
            self._waiting.extend(texts)

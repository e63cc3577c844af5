"""Serves one WebRTC viewer: paces its video, sends events, takes controls, ends with its session or key."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from cachetools import FIFOCache
from opentelemetry.context import Context

from turboserve import logs
from turboserve.bus.chunk_log import Chunk, StreamStart
from turboserve.contracts.errors import ChunkGoneError, TurboServeError, UnauthorizedError
from turboserve.contracts.events import SessionEvent
from turboserve.contracts.sessions import SessionRecord
from turboserve.gateway import metrics
from turboserve.gateway.auth.access import Identity
from turboserve.gateway.auth.revocable import ENDED
from turboserve.gateway.context import Gateway
from turboserve.gateway.events.schemas import public_event
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
from turboserve.gateway.whep.connection import ViewerConnection
from turboserve.gateway.whep.offer import CheckedOffer
from turboserve.gateway.whep.pacing import PacedFrame, Pacer
from turboserve.gateway.whep.video_track import RTP_CLOCK, VideoTrack
from turboserve.tasks import stop
from turboserve.telemetry import links_to, traceparent, within

CONNECT_S = 15.0
"""Time in which a viewer must connect after the answer, seconds."""
CHECK_S = 0.5
"""Interval at which a viewer's playhead is reported, and its key and its unread messages are checked, s."""
AHEAD_S = 12.0
"""Media that waits here for its time at most, seconds. The rest waits in the log."""
UNREAD_BYTES = 1 << 20
"""Messages that a viewer has not acknowledged, bytes. With more, its connection ends."""
LAST_MESSAGE_S = 1.0
"""Time for which the end of a connection waits until its last message is acknowledged, seconds."""

UNITS_KEPT = 64
"""Chunks whose access units are kept for other viewers."""

log = logs.get("whep")
_units: FIFOCache[tuple[str, int], tuple[AccessUnit, ...]] = FIFOCache(UNITS_KEPT)


def _units_of(chunk: Chunk) -> tuple[AccessUnit, ...]:
    """Return the chunk's access units: viewers of one session share them. Raises ChunkFormatError."""
    key = chunk.header.session, chunk.sequence
    if key not in _units:
        _units[key] = access_units(chunk.init, chunk.fragment)
    return _units[key]


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
    ) -> None:
        """`path`: that of the request, which problems name."""
        self.tenant, self.session = record.tenant, record.id
        self.leaving = asyncio.Event()
        """Set to end the connection, as the viewer asked for."""
        self._gateway, self._identity, self._record, self._start = gateway, identity, record, start
        self._pacer = Pacer(gateway.settings.whep_buffer_s)
        self._track = VideoTrack(self._pacer, gateway.clock, self._sending)
        self._connection = ViewerConnection(self._track, servers)
        self._watch = Watch(
            gateway, record, start, self_paced=False, events_after=events_after, on_event=self._event
        )
        self._requests = ViewerRequests(gateway, identity, self._watch, self._send, path, reports=False)
        self._coming: dict[int, Chunk] = {}
        """Chunks of which no frame was sent, by index: their headers are announced with the first frame."""
        self._init: bytes | None = None
        self._reported = asyncio.Event()
        self._messages = False

    async def answer(self, offer: CheckedOffer) -> str:
        """Return the answer to `offer`. Raises InvalidOfferError."""
        self._messages = offer.messages
        return await self._connection.answer(offer, own_addresses(self._gateway.settings.gateway_host))

    async def serve(self) -> None:
        """Serve the viewer until it leaves, the session or its key ends, or the gateway stops."""
        self._requests.links = links_to(traceparent())
        with within(Context()):
            try:
                async with self._watch:
                    await self._serve()
            except TurboServeError as error:
                log.info("viewer not served", session=self.session, problem=error.detail)
            finally:
                await self.close()

    async def close(self) -> None:
        self._track.stop()
        await self._connection.close()

    async def _serve(self) -> None:
        tasks: set[asyncio.Task[object]] = {
            asyncio.create_task(one)
            for one in (
                self._video(),
                self._listen(),
                self._check(),
                self._connection.gone.wait(),
                self.leaving.wait(),
                self._gateway.streams.stopping.wait(),
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
        if not self._connection.gone.is_set():
            await self._flush()

    async def _video(self) -> None:
        """Queue chunks, and return when all of an ended session were sent."""
        await self._connection.connected.wait()
        async with aclosing(self._watch.chunks()) as chunks:
            async for chunk in chunks:
                await self._queue(chunk)
                while self._pacer.queued_s > AHEAD_S:
                    await asyncio.sleep(CHECK_S)
        await self._track.dry.wait()
        await self._send(self._requests.end())

    async def _queue(self, chunk: Chunk) -> None:
        header = chunk.header
        units = _units_of(chunk)
        skip = skips(chunk, self._record)
        with self._watch.spans.deliver(chunk):
            if skip:
                self._coming.clear()
                await self._send(skip_message(chunk))
                await self._watch.skipped(header.start_s)
            self._coming[header.index] = chunk
            self._pacer.add(header.index, units, self._gateway.clock.monotonic(), skip=skip)
            self._track.changed()
            await self._watch.sent(chunk, len(chunk.fragment))

    def _sending(self, frame: PacedFrame) -> None:
        """Announce the chunk of which this is the first frame."""
        if not frame.first:
            return
        self._reported.set()
        chunk = self._coming.pop(frame.chunk.index, None)
        if chunk is None or not self._connection.opened.is_set():
            return
        if chunk.init != self._init:
            self._init = chunk.init
            self._connection.send(init_message(chunk).text())
        rtp_time = round(frame.presentation_s * RTP_CLOCK)
        message = protocol.ChunkMessage.of(chunk.header, len(chunk.fragment), rtp_time)
        self._connection.send(message.text())

    async def _listen(self) -> None:
        await self._connection.opened.wait()
        await self._send(self._requests.hello(self._record, self._start))
        while True:
            await self._requests.handle(await self._connection.messages.get())

    async def _events(self) -> None:
        if self._messages:
            await self._connection.opened.wait()
        await self._watch.events()

    async def _check(self) -> None:
        """Report the playhead. Return if the viewer has not connected, and if it does not read."""
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._connection.connected.wait()
        except TimeoutError:
            log.info("viewer has not connected", session=self.session)
            return
        clock, unread_since = self._gateway.clock, None
        checked = bool(self._gateway.keys) or self._identity.grant is not None
        while True:
            self._reported.clear()
            now = clock.monotonic()
            playhead_s = self._pacer.playhead_s(now)
            await self._gateway.timeline.reported(
                self.session, self._watch.viewer, playhead_s, max(0.0, self._pacer.end_s - playhead_s)
            )
            if checked and not self._gateway.authenticator.holds(self._identity):
                raise UnauthorizedError(ENDED, field="Authorization")
            waiting = self._connection.waiting_bytes
            unread_since = None if not waiting else unread_since or now
            late = unread_since is not None and now - unread_since > self._gateway.settings.write_timeout_s
            if late or waiting > UNREAD_BYTES or self._connection.flooded.is_set():
                log.info("viewer cut", session=self.session, unread_bytes=waiting)
                return
            try:
                async with asyncio.timeout(CHECK_S):
                    await self._reported.wait()
            except TimeoutError:
                continue

    async def _flush(self) -> None:
        deadline = self._gateway.clock.monotonic() + LAST_MESSAGE_S
        while self._connection.waiting_bytes and self._gateway.clock.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def _event(self, event: SessionEvent) -> None:
        await self._send(public_event(event))

    async def _send(self, message: OutgoingMessage) -> None:
        self._connection.send(message.text())

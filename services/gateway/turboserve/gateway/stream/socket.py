"""Serves one viewer's WebSocket: sends video and events, receives playheads and controls, reports errors."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind
from starlette.websockets import WebSocket, WebSocketDisconnect

from turboserve import logs
from turboserve.bus.chunk_log import StreamStart
from turboserve.contracts.errors import ChunkGoneError, InvalidInputError, TurboServeError
from turboserve.contracts.events import SessionEvent
from turboserve.contracts.keys import Scope
from turboserve.contracts.links import Role
from turboserve.contracts.sessions import SessionRecord
from turboserve.gateway import metrics
from turboserve.gateway.auth.access import Identity
from turboserve.gateway.context import Gateway
from turboserve.gateway.events.session_events import EventBase, public_event
from turboserve.gateway.problems.errors import MalformedRequestError
from turboserve.gateway.problems.schemas import problem_of
from turboserve.gateway.public import activity_of, timestamp
from turboserve.gateway.stream import client_messages, protocol
from turboserve.gateway.stream.watch import Watch
from turboserve.tasks import stop
from turboserve.telemetry import QUIET, links_to, traceparent, tracer, within
from turboserve.telemetry_names import SESSION

log = logs.get("stream")
_trace = tracer("gateway")

ENDED = 1000
"""Close code: the session ended and all its video was sent."""
BAD_MESSAGES = 1008
"""Close code: too many invalid messages."""
RESTART = 1012
"""Close code: the gateway stops. The client should reconnect with `?after=`."""
TRY_LATER = 1013
"""Close code: a temporary problem. The client should reconnect after `retry_after_s`."""
PROBLEM = 4000
"""Base of other close codes, plus the HTTP status of the problem sent before: 4401, 4404, 4410, 4422, …"""
CLOSE_S = 1.0
HISTORY_S = 5.0
"""Time in seconds for which the end of a stream waits for earlier events."""


def close_code(error: TurboServeError) -> int:
    """Return the close code after `error`."""
    return TRY_LATER if error.retryable else PROBLEM + error.status


async def refuse(socket: WebSocket, error: TurboServeError) -> None:
    """Send `error` and close. The socket is open, since browsers do not show a refused handshake."""
    with suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
        message = protocol.ErrorMessage.of_problem(problem_of(error, socket.url.path))
        await asyncio.wait_for(socket.send_text(message.text()), CLOSE_S)
        await asyncio.wait_for(socket.close(close_code(error), error.title), CLOSE_S)


class _TooManyBadMessagesError(Exception):
    pass


class Connection:
    """An accepted socket. Sends events with a number above `events_after`; None: only new events."""

    def __init__(
        self,
        socket: WebSocket,
        gateway: Gateway,
        identity: Identity,
        record: SessionRecord,
        start: StreamStart,
        events_after: int | None,
    ) -> None:
        self._socket = socket
        self._gateway = gateway
        self._identity = identity
        self._record = record
        self._start = start
        self._limit_bytes = gateway.settings.body_limit_bytes
        # A chunk is two messages, and no other message may be sent between them.
        self._sending = asyncio.Lock()
        self._init: bytes | None = None
        self._bad = 0
        self._links: list[Link] = []
        """To the span of the handshake."""
        self._watch = Watch(
            gateway,
            record,
            start,
            self_paced=False,
            events_after=events_after,
            on_event=self._event,
        )

    async def run(self) -> None:
        """Serve the viewer until the session ends, the viewer leaves or the gateway stops."""
        self._links = links_to(traceparent())
        # What this connection sends for hours is no part of the trace of its handshake.
        with within(Context()):
            await self._run()

    async def _run(self) -> None:
        try:
            async with self._watch:
                await self._send(self._hello())
                code, reason = await self._serve()
            with suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
                await asyncio.wait_for(self._socket.close(code, reason), CLOSE_S)
        except (WebSocketDisconnect, RuntimeError) as error:
            # Starlette raises RuntimeError for a send after the other side closed.
            log.debug("viewer left", session=self._record.id, error=repr(error))

    async def _serve(self) -> tuple[int, str]:
        video = asyncio.create_task(self._video())
        listening = asyncio.create_task(self._listen())
        stopping = asyncio.create_task(self._gateway.streams.stopping.wait())
        events = asyncio.create_task(self._watch.events())
        tasks: set[asyncio.Task[object]] = {video, listening, stopping, events}
        try:
            deciding = set(tasks)
            while True:
                done, deciding = await asyncio.wait(deciding, return_when=asyncio.FIRST_COMPLETED)
                if done != {events} or events.exception() is not None:
                    break
            for task in done:
                task.result()
            if video in done:
                # If the session had ended before, its video may be sent completely before its events are.
                await asyncio.wait({events}, timeout=HISTORY_S)
                await self._send(
                    protocol.End(
                        phase=self._watch.record.phase,
                        reason=self._watch.record.reason,
                        last=self._watch.last,
                    )
                )
                return ENDED, "session ended"
            return RESTART, "gateway stops"
        except _TooManyBadMessagesError:
            return BAD_MESSAGES, "too many bad messages"
        except TurboServeError as error:
            if isinstance(error, ChunkGoneError):
                metrics.gaps.add(1)
            # Stop the tasks first: one that waits for a slow reader holds the lock that the message needs.
            await stop(*tasks)
            await self._problem(error)
            return close_code(error), error.title
        finally:
            await stop(*tasks)

    async def _video(self) -> None:
        async with aclosing(self._watch.chunks()) as chunks:
            async for chunk in chunks:
                header, fragment = chunk.header, chunk.fragment
                with self._watch.spans.deliver(chunk):
                    async with self._sending:
                        if chunk.init != self._init:
                            self._init = chunk.init
                            init = protocol.Init(
                                mime=f'video/mp4; codecs="{header.codec}"',
                                bytes=len(chunk.init),
                                width=header.width,
                                height=header.height,
                                fps=header.fps,
                            )
                            await self._socket.send_text(init.text())
                            await self._socket.send_bytes(chunk.init)
                        # Of an ended session, a viewer gets all that is kept.
                        if header.drops_buffer and header.index > 0 and not self._record.phase.ended:
                            skip = protocol.Skip(
                                index=header.index, start_s=header.start_s, control_seq=header.control_seq
                            )
                            await self._socket.send_text(skip.text())
                            await self._watch.skipped(header.start_s)
                        await self._socket.send_text(protocol.ChunkMessage.of(header, len(fragment)).text())
                        await self._socket.send_bytes(fragment)
                await self._watch.sent(chunk, len(fragment))

    async def _event(self, event: SessionEvent) -> None:
        await self._send(public_event(event))

    async def _listen(self) -> None:
        while True:
            raw = await self._socket.receive()
            if raw["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(raw.get("code", 1005), raw.get("reason"))
            text = raw.get("text")
            message_id: str | None = None
            try:
                message = client_messages.read_message(text, self._limit_bytes)
                message_id = message.id
                with self._span(message):
                    await self._do(message)
            except (InvalidInputError, MalformedRequestError) as error:
                self._bad += 1
                await self._problem(error, message_id or client_messages.message_id(text, self._limit_bytes))
                if self._bad >= self._gateway.settings.bad_message_limit:
                    raise _TooManyBadMessagesError from None
            except TurboServeError as error:
                await self._problem(error, message_id)

    def _span(self, message: client_messages.ClientMessage) -> AbstractContextManager[object]:
        """Return the span of a request. It begins a trace, since the connection's own may last for hours."""
        if isinstance(
            message, client_messages.PlayheadReport | client_messages.FirstFrame | client_messages.Ping
        ):
            return nullcontext()
        return _trace.start_as_current_span(
            f"process {message.type}",
            context=Context(),
            kind=SpanKind.SERVER,
            links=self._links,
            attributes={SESSION: self._record.id},
            **QUIET,
        )

    async def _do(self, message: client_messages.ClientMessage) -> None:
        tenant, session = self._record.tenant, self._record.id
        if isinstance(message, client_messages.CHANGES):
            self._identity.require(Scope.SESSIONS_WRITE)
        match message:
            case client_messages.PlayheadReport():
                await self._gateway.timeline.reported(
                    session, self._watch.viewer, message.playhead_s, message.buffered_s
                )
            case client_messages.PromptRequest():
                receipt = await self._gateway.sessions.prompt(
                    tenant, session, message.prompt, message.id, "id", drop_buffer=message.drop_buffer
                )
                await self._send(
                    protocol.ReceiptMessage(
                        id=message.id,
                        prompt_id=receipt.prompt_id,
                        control_seq=receipt.control_seq,
                        accepted_at=timestamp(receipt.accepted_at),
                    )
                )
            case client_messages.ChangeRequest():
                await self._gateway.sessions.change(tenant, session, message)
            case client_messages.PauseRequest():
                await self._gateway.sessions.pause(tenant, session)
            case client_messages.ResumeRequest():
                await self._gateway.sessions.resume(tenant, session)
            case client_messages.FirstFrame():
                self._watch.shown()
            case client_messages.Ping():
                await self._send(protocol.Pong(id=message.id))

    def _hello(self) -> protocol.Hello:
        record = self._record
        return protocol.Hello(
            protocol_version=protocol.VERSION,
            session=record.id,
            phase=record.phase,
            activity=activity_of(record),
            prompt=record.prompt,
            model=record.model,
            seed=record.seed,
            epoch=record.epoch,
            worker=record.worker,
            target=record.target,
            control_seq=record.control_seq,
            applied_control_seq=record.applied_control_seq,
            next=self._start.index,
            start_s=self._start.start_s,
            events_after=self._watch.events_after,
            newest_event=record.event_sequence,
            max_message_bytes=self._limit_bytes,
            report_interval_s=self._gateway.settings.playhead_interval_s,
            role=Role.CONTROLLER if self._identity.may(Scope.SESSIONS_WRITE) else Role.VIEWER,
            gateways=self._gateway.settings.gateway_urls,
        )

    async def _problem(self, error: TurboServeError, message_id: str | None = None) -> None:
        problem = problem_of(error, self._socket.url.path)
        await self._send(protocol.ErrorMessage.of_problem(problem, message_id))

    async def _send(
        self,
        message: protocol.Hello
        | EventBase
        | protocol.ReceiptMessage
        | protocol.Pong
        | protocol.End
        | protocol.ErrorMessage,
    ) -> None:
        async with self._sending:
            await self._socket.send_text(message.text())

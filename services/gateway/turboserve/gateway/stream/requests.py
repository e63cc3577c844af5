"""Messages between a viewer and the gateway: the same over WebSocket and over WebRTC."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind

from turboserve.bus.chunk_log import Chunk, StreamStart
from turboserve.contracts.errors import InvalidInputError, TurboServeError
from turboserve.contracts.keys import Scope
from turboserve.contracts.links import Role
from turboserve.contracts.public_events import EventBase
from turboserve.contracts.sessions import SessionRecord
from turboserve.gateway.auth.access import Identity
from turboserve.gateway.context import Gateway
from turboserve.gateway.problems.errors import MalformedRequestError
from turboserve.gateway.problems.schemas import problem_of
from turboserve.gateway.public import activity_of, timestamp
from turboserve.gateway.stream import client_messages, protocol
from turboserve.gateway.stream.watch import Watch
from turboserve.telemetry import tracer
from turboserve.telemetry_names import SESSION

_trace = tracer("gateway")

OutgoingMessage = (
    protocol.Hello
    | protocol.Init
    | protocol.Skip
    | protocol.ChunkMessage
    | EventBase
    | protocol.ReceiptMessage
    | protocol.ControlReceiptMessage
    | protocol.Pong
    | protocol.End
    | protocol.ErrorMessage
)
"""What the gateway tells a viewer, besides video."""


class TooManyBadMessagesError(Exception):
    """The client has sent as many invalid messages as are tolerated."""


def init_message(chunk: Chunk) -> protocol.Init:
    """Return the announcement of the chunk's init segment."""
    header = chunk.header
    return protocol.Init(
        mime=f'video/mp4; codecs="{header.codec}"',
        bytes=len(chunk.init),
        width=header.width,
        height=header.height,
        fps=header.fps,
    )


def skip_message(chunk: Chunk) -> protocol.Skip:
    """Return the request to discard the video before the chunk."""
    header = chunk.header
    return protocol.Skip(index=header.index, start_s=header.start_s, control_seq=header.control_seq)


def skips(chunk: Chunk, record: SessionRecord) -> bool:
    """Whether viewers discard the video before the chunk. `record`: the session when the stream was opened.

    Of an ended session, a viewer gets all that is kept.
    """
    return chunk.header.drops_buffer and chunk.header.index > 0 and not record.phase.ended


class ViewerRequests:
    """Handles the messages of one viewer. `send` gets the answers."""

    def __init__(
        self,
        gateway: Gateway,
        identity: Identity,
        watch: Watch,
        send: Callable[[OutgoingMessage], Awaitable[None]],
        path: str,
        *,
        reports: bool = True,
    ) -> None:
        """`path`: that of the request that opened the stream, which problems name. `reports`: whether the
        viewer's own playheads count."""
        self._gateway, self._identity, self._watch, self._send = gateway, identity, watch, send
        self._path, self._reports = path, reports
        self._limit_bytes = gateway.settings.body_limit_bytes
        self._bad = 0
        self.links: list[Link] = []
        """To the span of the request that opened the stream."""

    async def handle(self, text: str | None) -> None:
        """Do what a message asks for. None: it was binary. Raises TooManyBadMessagesError."""
        message_id: str | None = None
        try:
            message = client_messages.read_message(text, self._limit_bytes)
            message_id = message.id
            with self._span(message):
                await self._do(message)
        except (InvalidInputError, MalformedRequestError) as error:
            self._bad += 1
            await self.problem(error, message_id or client_messages.message_id(text, self._limit_bytes))
            if self._bad >= self._gateway.settings.bad_message_limit:
                raise TooManyBadMessagesError from None
        except TurboServeError as error:
            await self.problem(error, message_id)

    async def problem(self, error: TurboServeError, message_id: str | None = None) -> None:
        """Tell the viewer of a problem."""
        await self._send(protocol.ErrorMessage.of_problem(problem_of(error, self._path), message_id))

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
            links=self.links,
            attributes={SESSION: self._watch.record.id},
            notes_errors=False,
        )

    async def _do(self, message: client_messages.ClientMessage) -> None:
        tenant, session = self._watch.record.tenant, self._watch.record.id
        if isinstance(message, client_messages.CHANGES):
            self._identity.require(Scope.SESSIONS_WRITE)
        match message:
            case client_messages.PlayheadReport():
                if not self._reports:
                    return
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
            case client_messages.ControlRequest():
                accepted = await self._gateway.sessions.set_control(
                    tenant, session, message, message.id, "id"
                )
                await self._send(
                    protocol.ControlReceiptMessage(
                        id=message.id,
                        control_id=accepted.control_id,
                        control_seq=accepted.control_seq,
                        accepted_at=timestamp(accepted.accepted_at),
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

    def end(self) -> protocol.End:
        """Return the message that follows all video of an ended session."""
        record = self._watch.record
        return protocol.End(phase=record.phase, reason=record.reason, last=self._watch.last)

    def hello(self, record: SessionRecord, start: StreamStart) -> protocol.Hello:
        """Return the first message. `record`: the session when the stream was opened."""
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
            controls=record.controls,
            control_seq=record.control_seq,
            applied_control_seq=record.applied_control_seq,
            next=start.index,
            start_s=start.start_s,
            events_after=self._watch.events_after,
            newest_event=record.event_sequence,
            max_message_bytes=self._limit_bytes,
            report_interval_s=self._gateway.settings.playhead_interval_s,
            role=Role.CONTROLLER if self._identity.may(Scope.SESSIONS_WRITE) else Role.VIEWER,
            gateways=self._gateway.settings.gateway_urls,
        )

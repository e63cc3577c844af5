"""WS /v1/sessions/{id}/stream: video and events to a viewer, playheads and changes from it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

from fastapi import APIRouter
from opentelemetry.context import Context
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from turboserve import logs
from turboserve.bus.chunk_log import StreamStart
from turboserve.contracts.errors import ChunkGoneError, InvalidInputError, TurboServeError
from turboserve.contracts.events import SessionEvent
from turboserve.contracts.keys import Scope
from turboserve.contracts.links import Role
from turboserve.contracts.public_events import public_event
from turboserve.contracts.sessions import SessionRecord
from turboserve.gateway import metrics
from turboserve.gateway.auth.access import Identity
from turboserve.gateway.auth.middleware import admitted, needs
from turboserve.gateway.context import Gateway, gateway_of, owner_of
from turboserve.gateway.events.session_events import known_position
from turboserve.gateway.problems.errors import UpgradeRequiredError
from turboserve.gateway.problems.schemas import problem_of
from turboserve.gateway.stream import protocol
from turboserve.gateway.stream.requests import (
    OutgoingMessage,
    TooManyBadMessagesError,
    ViewerRequests,
    init_message,
    skip_message,
    skips,
)
from turboserve.gateway.stream.watch import Watch, place_of_viewer, until_decided
from turboserve.tasks import stop
from turboserve.telemetry import links_to, traceparent, within

router = APIRouter(prefix="/v1/sessions", tags=["video"])

log = logs.get("stream")

ENDED = 1000
"""Close code: the session ended and all its video was sent."""
BAD_MESSAGES = 1008
"""Close code: too many invalid messages."""
RESTART = 1012
"""Close code: the gateway stops, or is cut off from its broker. The client should reconnect with `?after=`,
to another gateway if there is one."""
TRY_LATER = 1013
"""Close code: a temporary problem. The client should reconnect after `retry_after_s`."""
PROBLEM = 4000
"""Base of other close codes, plus the HTTP status of the problem sent before: 4401, 4404, 4410, 4422, …"""
CLOSE_S = 1.0
HISTORY_S = 5.0
"""Time in seconds for which the end of a stream waits for earlier events."""


@router.get(
    "/{session}/stream", dependencies=[needs(Scope.SESSIONS_READ, Role.VIEWER)], include_in_schema=False
)
async def not_a_socket(session: str) -> Response:
    raise UpgradeRequiredError(
        "this is a WebSocket, and the request did not arrive as one: see that proxies pass Upgrade on",
        field="Upgrade",
        limit="websocket",
    )


@router.websocket("/{session}/stream", dependencies=[needs(Scope.SESSIONS_READ, Role.VIEWER)])
async def stream(socket: WebSocket, session: str) -> None:
    """Send the video and the events of the session. See docs/reference/api.md for the messages."""
    gateway = gateway_of(socket)
    await socket.accept()
    try:
        identity = admitted(socket.scope)
        after = _index(socket.query_params.get("after"), "after", -1)
        events = _index(socket.query_params.get("events_after"), "events_after", 0)
        with gateway.streams.place(*owner_of(identity)):
            record, start = await place_of_viewer(gateway, identity.tenant, session, after)
            if events is not None:
                events = await known_position(gateway.bus, record, events)
            await Connection(socket, gateway, identity, record, start, events).run()
    except TurboServeError as error:
        await refuse(socket, error)
    except WebSocketDisconnect:
        return


def _index(text: str | None, name: str, least: int) -> int | None:
    if text is None:
        return None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 16 and int(text) >= least):
        raise InvalidInputError(f"{name}: must be a whole number, {least} or more", field=name, limit=least)
    return int(text)


def close_code(error: TurboServeError) -> int:
    """Return the close code after `error`."""
    return TRY_LATER if error.retryable else PROBLEM + error.status


async def refuse(socket: WebSocket, error: TurboServeError) -> None:
    """Send `error` and close. The socket is open, since browsers do not show a refused handshake."""
    with suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
        message = protocol.ErrorMessage.of_problem(problem_of(error, socket.url.path))
        await asyncio.wait_for(socket.send_text(message.text()), CLOSE_S)
        await asyncio.wait_for(socket.close(close_code(error), error.title), CLOSE_S)


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
        self._record = record
        self._start = start
        # A chunk is two messages, and no other message may be sent between them.
        self._sending = asyncio.Lock()
        self._init: bytes | None = None
        self._watch = Watch(
            gateway,
            record,
            start,
            self_paced=False,
            events_after=events_after,
            on_event=self._event,
        )
        self._requests = ViewerRequests(gateway, identity, self._watch, self._send, socket.url.path)

    async def run(self) -> None:
        """Serve the viewer until the session ends, the viewer leaves or the gateway stops."""
        self._requests.links = links_to(traceparent())
        # What this connection sends for hours is no part of the trace of its handshake.
        with within(Context()):
            await self._run()

    async def _run(self) -> None:
        try:
            async with self._watch:
                await self._send(self._requests.hello(self._record, self._start))
                code, reason = await self._serve()
            with suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
                await asyncio.wait_for(self._socket.close(code, reason), CLOSE_S)
        except (WebSocketDisconnect, RuntimeError) as error:
            # Starlette raises RuntimeError for a send after the other side closed.
            log.debug("viewer left", session=self._record.id, error=repr(error))

    async def _serve(self) -> tuple[int, str]:
        video = asyncio.create_task(self._video())
        listening = asyncio.create_task(self._listen())
        streams = self._gateway.streams
        leaving = asyncio.create_task(streams.until_sent_on())
        events = asyncio.create_task(self._watch.events())
        tasks: set[asyncio.Task[object]] = {video, listening, leaving, events}
        try:
            if video in await until_decided(tasks, events):
                # If the session had ended before, its video may be sent completely before its events are.
                await asyncio.wait({events}, timeout=HISTORY_S)
                await self._send(self._requests.end())
                return ENDED, "session ended"
            return RESTART, "gateway stops" if streams.stopping.is_set() else "no answer of the broker"
        except TooManyBadMessagesError:
            return BAD_MESSAGES, "too many bad messages"
        except TurboServeError as error:
            if isinstance(error, ChunkGoneError):
                metrics.gaps.add(1)
            # Stop the tasks first: one that waits for a slow reader holds the lock that the message needs.
            await stop(*tasks)
            await self._requests.problem(error)
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
                            await self._socket.send_text(init_message(chunk).text())
                            await self._socket.send_bytes(chunk.init)
                        if skips(chunk, self._record):
                            await self._socket.send_text(skip_message(chunk).text())
                            await self._watch.skipped(header.start_s)
                        await self._socket.send_text(protocol.ChunkMessage.text_of(header, len(fragment)))
                        await self._socket.send_bytes(fragment)
                await self._watch.sent(chunk, len(fragment))

    async def _event(self, event: SessionEvent) -> None:
        await self._send(public_event(event))

    async def _listen(self) -> None:
        while True:
            raw = await self._socket.receive()
            if raw["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(raw.get("code", 1005), raw.get("reason"))
            await self._requests.handle(raw.get("text"))

    async def _send(self, message: OutgoingMessage) -> None:
        async with self._sending:
            await self._socket.send_text(message.text())

"""uvicorn's HTTP and WebSocket protocols, with limits and deadlines, and without tracebacks for bad input."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import Any

import h11
from starlette.responses import Response
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.http11 import MAX_LINE_LENGTH

from turboserve.contracts.errors import TurboServeError
from turboserve.gateway.problems.errors import (
    HeadersTooLargeError,
    MalformedRequestError,
    RequestTimeoutError,
)
from turboserve.gateway.problems.handlers import problem_response
from turboserve.gateway.serving.guard import FrameBudget, Guard, GuardedProtocol, Overdue, Stage

LINE_BYTES = MAX_LINE_LENGTH - 64
"""Maximum bytes of a request target or header in a handshake. The library limits the whole line, with `GET …
HTTP/1.1`."""
BURST_S = 10.0
"""Size of a burst: seconds' worth of frames that may arrive at once."""
INVALID_TEXT = 1007
TOO_LARGE = 431


class GuardedWebSocket(GuardedProtocol, WebSocketsSansIOProtocol):  # type: ignore[misc]
    """One connection that speaks WebSocket.

    Every frame counts against a budget, also pings and empty fragments. The server reads more slowly from a
    client that exceeds it, so that neither answers nor fragments accumulate.
    """

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], *, guard: Guard
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.guard = guard
        rate = guard.limits.frames_per_s
        self._budget = FrameBudget(rate, rate * BURST_S, self.loop.time())
        self._throttle: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._throttle is not None:
            self._throttle.cancel()
        super().connection_lost(exc)

    def start_keepalive(self) -> None:
        """Note that the handshake is complete. uvicorn calls this."""
        self.guard.enter(Stage.ANSWER)
        super().start_keepalive()

    def handle_events(self) -> None:
        wait_s = self._budget.spend(len(self.conn.events), self.loop.time())
        super().handle_events()
        if wait_s and self._throttle is None:
            self._throttle = self.loop.call_later(wait_s, self._read_on)
            self.transport.pause_reading()

    async def receive(self) -> Any:
        message = await super().receive()
        if self._throttle is not None:
            self.transport.pause_reading()  # Taking a message resumed reading.
        return message

    def _read_on(self) -> None:
        self._throttle = None
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text":
            whole = b"".join(self.frames)
            try:
                whole.decode()
            except UnicodeDecodeError:
                self.frames = []
                if not self.close_sent:
                    self.conn.send_close(INVALID_TEXT, "text that is not UTF-8")
                    self.handle_parser_exception()
                return
            self.frames = [whole]
        super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        if self.conn.close_sent is None:
            # The handshake could not be read, so there is no WebSocket to close yet.
            self.transport.close()
            return
        super().handle_parser_exception()


class _Parser(h11.Connection):
    """h11's parser with two more limits: headers of a head, and bytes in a line of a WebSocket handshake."""

    def __init__(self, header_bytes: int, header_count: int) -> None:
        super().__init__(h11.SERVER, header_bytes)
        self._header_count = header_count

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            if len(event.headers) > self._header_count:
                raise h11.RemoteProtocolError(f"over {self._header_count} headers", TOO_LARGE)
            upgrade = any(name == b"upgrade" for name, _ in event.headers)
            longest = max([len(event.target), *(len(name) + len(value) for name, value in event.headers)])
            if upgrade and longest > LINE_BYTES:
                raise h11.RemoteProtocolError(f"a line over {LINE_BYTES} bytes", TOO_LARGE)
        return event


class GuardedHttp(GuardedProtocol, H11Protocol):  # type: ignore[misc]
    """One connection that speaks HTTP/1.1, until it is upgraded."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], *, guard: Guard
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.guard = guard
        guard.timed_out = self._timed_out
        self.conn = _Parser(guard.limits.header_bytes, guard.limits.header_count)
        self.ws_protocol_class = partial(GuardedWebSocket, guard=guard)  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def _note(self) -> None:
        """Report to the guard what the connection waits for."""
        protocol = self.guard.transport and self.guard.transport.get_protocol()
        if protocol is not self:
            return  # The connection is a WebSocket now.
        answered = self.cycle is None or self.cycle.response_complete
        if answered and self.conn.their_state is not h11.SEND_BODY:
            between = self.cycle is not None and not self.conn.trailing_data[0]
            self.guard.enter(Stage.IDLE if between else Stage.HEAD)
        elif answered or self.cycle.more_body:
            self.guard.enter(Stage.BODY)
        else:
            self.guard.enter(Stage.ANSWER)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self.guard.timed_out = None
        # After an answer the connection was idle. The time for the handshake begins now.
        self.guard.enter(Stage.HEAD)
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 could not read. uvicorn calls this."""
        error = sys.exc_info()[1]
        limits = self.guard.limits
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == TOO_LARGE:
            self._refuse(
                HeadersTooLargeError(
                    f"the head of the request is over {limits.header_bytes} bytes, {limits.header_count} "
                    f"headers, or {LINE_BYTES} bytes in a line of a WebSocket's",
                    field="headers",
                    limit=limits.header_bytes,
                )
            )
        else:
            self._refuse(MalformedRequestError("the request is not HTTP/1.1", field="request"))

    def _timed_out(self, reason: Overdue) -> None:
        limit_s = getattr(self.guard.limits.deadlines, f"{reason.value}_s")
        idle = reason is Overdue.HEAD and not self.conn.trailing_data[0]
        # A head belongs to no cycle yet: the last one, if any, is the request before.
        begun = reason is Overdue.BODY and self.cycle is not None and self.cycle.response_started
        if not idle and not begun:
            self._refuse(
                RequestTimeoutError(
                    f"the {reason.value} of the request was not complete after {limit_s:g} s",
                    field=reason.value,
                    limit=limit_s,
                )
            )

    def _refuse(self, error: TurboServeError) -> None:
        """Answer and close. Bypasses h11, whose state is invalid after an unreadable request."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(raw(problem_response(error, "", {"Connection": "close"})))
        self.transport.close()


def raw(response: Response) -> bytes:
    """Return a whole HTTP response as bytes."""
    head = [b"HTTP/1.1 %d %s\r\n" % (response.status_code, STATUS_PHRASES[response.status_code])]
    head += [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
    return b"".join([*head, b"\r\n", bytes(response.body)])

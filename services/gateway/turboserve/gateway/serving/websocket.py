"""uvicorn's WebSocket protocol with a limited rate of frames, and without tracebacks for bad input."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.http11 import MAX_LINE_LENGTH

from turboserve.gateway.serving.connection import FrameBudget, Stage
from turboserve.gateway.serving.guard import Guard, GuardedProtocol

LINE_BYTES = MAX_LINE_LENGTH - 64
"""Maximum bytes of a request target or header in a handshake. The library limits the whole line, with `GET …
HTTP/1.1`."""
BURST_S = 10.0
"""Size of a burst: seconds' worth of frames that may arrive at once."""
INVALID_TEXT = 1007


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

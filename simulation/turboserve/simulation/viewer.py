"""A viewer's connection to a gateway: the gateway's own endpoint, called with an ASGI scope in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from pydantic_core import from_json, to_json
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from turboserve.contracts.errors import TurboServeError
from turboserve.gateway.auth.access import Identity
from turboserve.gateway.auth.hashing import TENANT_SCOPES
from turboserve.gateway.auth.middleware import Authenticate
from turboserve.gateway.context import Gateway
from turboserve.gateway.stream.mp4 import stream_mp4
from turboserve.gateway.stream.socket import stream
from turboserve.simulation.log_checks import SimulatedViewer
from turboserve.simulation.service import ConnectionLostError, ServiceProcess
from turboserve.simulation.tenant_keys import key_of
from turboserve.simulation.world import World

ENDED = 1000
"""Close code of a WebSocket that has sent the whole video."""
GONE = (4410, 410)
"""Close code and status when the next chunk is no longer kept; the viewer begins again at the playhead."""


class ViewerConnection:
    """One connection. `closed` is called once, when the connection has ended for any reason."""

    def __init__(
        self,
        world: World,
        viewer: SimulatedViewer,
        service: ServiceProcess,
        closed: Callable[[ViewerConnection], None],
    ) -> None:
        self.viewer, self.service = viewer, service
        self.code: int | None = None
        self._world, self._closed = world, closed
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._announced: dict[str, Any] = {}
        self._begun = False
        self._reporting: asyncio.TimerHandle | None = None
        """The next report; None until the connection is open."""

    def open(self, gateway: Gateway) -> None:
        """Start the gateway's endpoint for this connection."""
        if self.viewer.socket:
            self._incoming.put_nowait({"type": "websocket.connect"})
        work = self._serve_socket(gateway) if self.viewer.socket else self._serve_video(gateway)
        self.service.submit(work).add_done_callback(self._over)

    def leave(self) -> None:
        """Close the connection on the viewer's side."""
        self._incoming.put_nowait(
            {"type": "websocket.disconnect" if self.viewer.socket else "http.disconnect", "code": 1001}
        )

    # In the gateway's process

    async def _serve_socket(self, gateway: Gateway) -> None:
        session = self.viewer.session
        after = None if self.viewer.next is None else self.viewer.next - 1
        scope: Scope = {
            "type": "websocket",
            "app": SimpleNamespace(state=SimpleNamespace(gateway=gateway)),
            "path": f"/v1/sessions/{session}/stream",
            "headers": [(b"authorization", f"Bearer {key_of(self.viewer.tenant)}".encode())],
            "query_string": b"" if after is None else f"after={after}".encode(),
            "client": ("127.0.0.1", 1),
        }

        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            await stream(WebSocket(scope, receive, send), session)

        app = Authenticate(endpoint, gateway.authenticator, gateway.keys)
        await app(scope, self._incoming.get, self._socket_sends)

    async def _serve_video(self, gateway: Gateway) -> None:
        viewer = self.viewer
        after = None if viewer.next is None else viewer.next - 1
        sender = Identity(viewer.tenant, TENANT_SCOPES)
        try:
            response = await stream_mp4(viewer.session, sender, gateway, after)
        except TurboServeError as error:
            self.code = error.status
            return
        await response({"type": "http"}, self._incoming.get, self._video_sends)

    async def _socket_sends(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "websocket.close":
            self.code = message["code"]
        elif (text := message.get("text")) is not None:
            self._announced = from_json(text)
            if self._announced["type"] == "skip":
                self._skip(self._announced["index"], self._announced["start_s"])
            elif self._announced["type"] == "hello" and self._reporting is None:
                self.viewer.played_at = self._world.loop.time()
                self._report_later()
        elif "bytes" in message and self._announced["type"] == "chunk":
            about = self._announced
            self._got(about["index"], message["bytes"], about["start_s"] + about["duration_s"])

    async def _video_sends(self, message: Mapping[str, Any]) -> None:
        body = message.get("body", b"")
        if not body:
            if message["type"] == "http.response.body":
                self.code = ENDED
        elif not self._begun:
            # This body is the init segment.
            self._begun = True
        else:
            index = self._world.checker.log.index_of(self.viewer.session, body)
            self._got(index, body, 0.0)

    # The viewer

    def _got(self, index: int, fragment: bytes, end_s: float) -> None:
        viewer = self.viewer
        self._world.checker.delivered(viewer, index, fragment)
        if not viewer.seen:
            viewer.on_first()
        viewer.next = index + 1
        viewer.seen += 1
        viewer.end_s = end_s
        viewer.on_chunk(index, end_s)

    def _skip(self, index: int, start_s: float) -> None:
        viewer = self.viewer
        self._world.checker.log.skipped(viewer, index)
        viewer.skips += 1
        if viewer.player is None:
            viewer.playhead_s = max(viewer.playhead_s, start_s)

    def _report_later(self) -> None:
        self._reporting = self._world.later(self._world.scale.report_s, self._report)

    def _report(self) -> None:
        """Play what has arrived, in real time, and report the playhead."""
        viewer, now = self.viewer, self._world.loop.time()
        if viewer.player is not None:
            viewer.playhead_s = viewer.player.advance(now)
        else:
            viewer.playhead_s = max(
                viewer.playhead_s, min(viewer.end_s, viewer.playhead_s + now - viewer.played_at)
            )
        viewer.played_at = now
        report = {
            "type": "playhead",
            "playhead_s": viewer.playhead_s,
            "buffered_s": max(0.0, viewer.end_s - viewer.playhead_s),
        }
        self._incoming.put_nowait({"type": "websocket.receive", "text": to_json(report).decode()})
        self._report_later()

    def _over(self, answer: asyncio.Future[None]) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        error = answer.exception()
        if error is not None and not isinstance(error, ConnectionLostError):
            self._world.checker.fail("no_core_fails", f"{self.service.name}: {error!r}")
        self._closed(self)

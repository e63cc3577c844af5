"""One viewer of one session, as an external client: REST to control, WebSocket to watch.

The viewer reconnects with `?after=` for as long as it watches. Any failure, also of the gateway, shows only
as a later chunk.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from turboserve.bench.streaming.player import Player
from turboserve.bench.streaming.problems import ProblemError
from turboserve.bench.streaming.received import PromptSwitch, Received
from turboserve.bench.streaming.rest import request
from turboserve.tasks import stop

MESSAGE_LIMIT_BYTES = 16 * 2**20
REPORT_INTERVAL_S = 0.25
RECONNECT_S = 0.2
SILENT_S = 2.0
CLOSED_FOR_GOOD = 4000
"""From here on, a close code is this plus the HTTP status of a problem that a retry does not solve."""


@dataclass
class Viewer:
    """Watches `session`. With `keep_video`, keeps every init segment and fragment, for decoding."""

    api: httpx.AsyncClient
    session: str
    keep_video: bool = False
    on_chunk: Callable[[Received], None] | None = None
    player: Player = field(default_factory=Player)
    chunks: list[Received] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    """Errors that the gateway reported on the WebSocket."""
    skips: list[tuple[int, int]] = field(default_factory=list)
    """For each `skip`: the chunk that it names, and the chunk that came after it."""
    gateways: tuple[str, ...] = ()
    """Addresses of several gateways. The viewer leaves one that is silent for `SILENT_S` for the next."""
    report_s: float = REPORT_INTERVAL_S
    """Time between two reports of the playhead."""
    connections: int = 0
    greeted_at: float = math.inf
    """Wall time of the first connection's greeting. Later chunks arrive as they are made."""
    ended: dict[str, Any] | None = None
    """The stream's last message, once the session is over."""
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _init: bytes = b""
    _skip: dict[str, Any] | None = None
    """Announces that the next chunk is the one to skip to."""
    _socket: ClientConnection | None = None
    _gateway: int = 0
    _heard_s: float = 0.0
    """Monotonic time of the last message."""

    @classmethod
    async def create(
        cls, api: httpx.AsyncClient, prompt: str, *, keep_video: bool = False, **more: Any
    ) -> Viewer:
        """Open a session; `more`: model, seed, metadata. Raises ProblemError."""
        answer = await request(api, "POST", "/v1/sessions", json={"prompt": prompt, **more})
        return cls(api, answer["id"], keep_video=keep_video)

    @property
    def last(self) -> int:
        """Index of the newest chunk that arrived, -1 before the first."""
        return self.chunks[-1].index if self.chunks else -1

    def video(self) -> bytes:
        """Return all received video as one MP4; empty unless video is kept."""
        return (
            b"".join([self.chunks[0].init, *(chunk.fragment for chunk in self.chunks)])
            if self.chunks
            else b""
        )

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Viewer]:
        """Watch in the background for as long as the block runs."""
        task = asyncio.create_task(self.watch())
        try:
            yield self
        finally:
            await stop(task)
            if not task.cancelled():
                task.result()

    async def watch(self) -> None:
        """Watch until the session ends, across broken connections. Raises ProblemError if refused."""
        while self.ended is None:
            try:
                # Forward the API key, if the client has one.
                key = {
                    name: self.api.headers[name] for name in ("Authorization",) if name in self.api.headers
                }
                async with connect(
                    self._stream_url(),
                    max_size=MESSAGE_LIMIT_BYTES,
                    open_timeout=SILENT_S if self.gateways else 5,
                    additional_headers=key,
                ) as socket:
                    self.connections += 1
                    self._heard_s = time.monotonic()
                    self._socket, self._skip = socket, None
                    reports = asyncio.create_task(self._report(socket))
                    try:
                        await self._read(socket)
                    finally:
                        self._socket = None
                        reports.cancel()
            except ConnectionClosed as closed:
                self._check_closed(closed.rcvd.code if closed.rcvd is not None else 0)
            except (OSError, TimeoutError, WebSocketException):
                pass
            if self.ended is None:
                self._gateway += 1
                await asyncio.sleep(RECONNECT_S)

    async def drop_connection(self) -> None:
        """Cut the connection as a network would: without a closing handshake."""
        if self._socket is not None:
            self._socket.transport.abort()

    async def say(self, text: str) -> None:
        """Send one WebSocket message as it is."""
        if self._socket is not None:
            await self._socket.send(text)

    async def until(self, condition: Callable[[], bool], limit_s: float, what: str = "the condition") -> None:
        """Wait until arriving messages make `condition` true.

        Raises TimeoutError that names what was missing.
        """
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(condition), limit_s)
            except TimeoutError:
                raise TimeoutError(
                    f"session {self.session}: no {what} within {limit_s} s; newest chunk {self.last}, "
                    f"{self.connections} connections, events {[event['type'] for event in self.events]}"
                ) from None

    async def more_chunks(self, count: int, limit_s: float) -> None:
        """Wait until `count` further chunks have arrived."""
        wanted = len(self.chunks) + count
        await self.until(lambda: len(self.chunks) >= wanted, limit_s, f"{count} further chunks")

    async def event(self, kind: str, limit_s: float, **having: Any) -> dict[str, Any]:
        """Wait for an event of this type with these values."""

        def found() -> dict[str, Any] | None:
            for event in self.events:
                if event["type"] == kind and all(event.get(key) == value for key, value in having.items()):
                    return event
            return None

        await self.until(lambda: found() is not None, limit_s, f"event {kind} {having or ''}".rstrip())
        event = found()
        assert event is not None
        return event

    # Control, over REST

    async def get(self) -> dict[str, Any]:
        return await request(self.api, "GET", f"/v1/sessions/{self.session}")

    async def submit(self, prompt: str, *, drop_buffer: bool = False) -> PromptSwitch:
        """Submit another prompt; `prompt.applied` follows as an event with the same prompt id.

        With `drop_buffer`, the viewer skips to the first chunk that shows it.
        """
        submitted_s, next_chunk = time.monotonic(), self.player.next_chunk
        receipt = await request(
            self.api,
            "POST",
            f"/v1/sessions/{self.session}/prompts",
            json={"prompt": prompt, **({"drop_buffer": True} if drop_buffer else {})},
        )
        return PromptSwitch(
            receipt["prompt_id"], receipt["control_seq"], submitted_s, time.monotonic(), next_chunk
        )

    async def pause(self) -> dict[str, Any]:
        answer = await request(self.api, "POST", f"/v1/sessions/{self.session}/pause")
        self.player.pause(True, time.monotonic())
        return answer

    async def resume(self) -> dict[str, Any]:
        answer = await request(self.api, "POST", f"/v1/sessions/{self.session}/resume")
        self.player.pause(False, time.monotonic())
        return answer

    async def delete(self) -> dict[str, Any]:
        return await request(self.api, "DELETE", f"/v1/sessions/{self.session}")

    # The stream

    def _stream_url(self) -> str:
        gateways = self.gateways or (str(self.api.base_url),)
        base = gateways[self._gateway % len(gateways)].rstrip("/").replace("http", "ws", 1)
        places = []
        if self.chunks:
            places.append(f"after={self.last}")
        if self.events:
            places.append(f"events_after={self.events[-1]['sequence']}")
        return f"{base}/v1/sessions/{self.session}/stream?{'&'.join(places)}"

    def _check_closed(self, code: int) -> None:
        if code >= CLOSED_FOR_GOOD:
            raise ProblemError(code - CLOSED_FOR_GOOD, self.errors[-1] if self.errors else {})

    async def _read(self, socket: ClientConnection) -> None:
        announced: dict[str, Any] | None = None
        async for message in socket:
            self._heard_s = time.monotonic()
            if isinstance(message, bytes):
                if announced is not None:
                    self._binary(announced, message)
                announced = None
            else:
                announced = self._text(json.loads(message))
            async with self._changed:
                self._changed.notify_all()

    def _text(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Handle one JSON message. Returns it if it announces a binary message."""
        match message["type"]:
            case "chunk" | "init":
                return message
            case "hello":
                self.greeted_at = min(self.greeted_at, time.time())
            case "end":
                self.ended = message
            case "error":
                self.errors.append(message)
            case "skip":
                self._skip = message
            case kind if "." in kind:
                self.events.append({**message, "received_s": time.monotonic()})
        return None

    def _binary(self, announced: dict[str, Any], data: bytes) -> None:
        if announced["type"] == "init":
            self._init = data
            return
        received_at, now_s = time.time(), time.monotonic()
        start_s = announced["start_s"]
        end_s = start_s + announced["duration_s"]
        skip, self._skip = self._skip, None
        if not self.player.arrived(announced["index"], start_s, end_s, now_s):
            return
        if skip is not None:
            self.skips.append((skip["index"], announced["index"]))
            self.player.skip(start_s, now_s)
        kept = (self._init, data) if self.keep_video else (b"", b"")
        received = Received.of(announced, received_at, len(data), *kept)
        self.chunks.append(received)
        if self.on_chunk is not None:
            self.on_chunk(received)

    async def _report(self, socket: ClientConnection) -> None:
        shown = False
        with suppress(WebSocketException, OSError):
            while True:
                self.player.tick(time.monotonic())
                if not shown and self.player.started:
                    shown = True
                    await socket.send(json.dumps({"type": "first_frame"}))
                report = {
                    "type": "playhead",
                    "playhead_s": round(self.player.position_s, 3),
                    "buffered_s": round(self.player.buffered_s, 3),
                }
                await socket.send(json.dumps(report))
                if self.gateways:
                    await socket.send(json.dumps({"type": "ping"}))
                    if time.monotonic() - self._heard_s > SILENT_S:
                        socket.transport.abort()
                await asyncio.sleep(self.report_s)

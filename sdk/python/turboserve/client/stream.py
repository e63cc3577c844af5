"""A session's video and events over a WebSocket, across broken connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

import tenacity
from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from turboserve.client.errors import (
    ChunkGoneError,
    GatewayUnreachableError,
    ProtocolError,
    problem_error,
)
from turboserve.client.models import Chunk, End, Event, Hello, VideoFormat

PROTOCOL_VERSION = 1
MESSAGE_LIMIT_BYTES = 64 * 2**20
RECONNECT_WITHIN_S = 60.0
"""Time without a connection after which a stream gives up."""
_FINAL = {4401: 401, 4403: 403, 4404: 404, 4410: 410, 4422: 422, 1007: 400, 1008: 400, 1009: 413}
"""Close codes after which a connection with the same parameters would end in the same way, and the status of
their problems."""
_NO_CLOSE_FRAME = 1006
_BACKOFF = tenacity.wait_random_exponential(multiplier=0.1, max=3.0)


class VideoStream:
    """Chunks of one session in order, without gaps and repetitions.

    `async for chunk in stream` gives the chunks, and ends with the session. A worker generates only a few
    seconds ahead of the playhead. The playhead is at the chunk that the caller takes next, unless the caller
    sets `playhead_s`: so a caller that stops taking chunks stops the generation.
    """

    def __init__(
        self,
        url: str,
        headers: dict[str, str],
        *,
        after: int | None = None,
        events_after: int | None = None,
        skip_lost: bool = False,
        reconnect_within_s: float = RECONNECT_WITHIN_S,
    ) -> None:
        """`url`: `ws://…/stream`. See `AsyncSession.watch` for the other arguments."""
        self.hello: Hello | None = None
        """State of the session at the newest connection. None before the first."""
        self.end: End | None = None
        """How the session ended. None: it has not."""
        self.playhead_s: float | None = None
        """Media time that the caller shows. None: the playhead follows the chunks that the caller takes."""
        self.connections = 0
        """Number of connections so far."""
        self._url, self._headers = url, headers
        self._after, self._events_after = after, events_after
        self._skip_lost, self._reconnect_within_s = skip_lost, reconnect_within_s
        self._socket: ClientConnection | None = None
        self._reporter: asyncio.Task[None] | None = None
        self._format: VideoFormat | None = None
        self._taken_s = self._received_s = 0.0
        self._problem: dict[str, Any] = {}
        self._announced: dict[str, Any] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        await self._disconnect()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[Chunk]:
        async for item in self.items():
            if isinstance(item, Chunk):
                yield item

    async def items(self) -> AsyncIterator[Chunk | Event]:
        """Chunks and events, in the order in which they come.

        Raises ChunkGoneError if the log lost the next chunk (unless `skip_lost`), other ProblemErrors, and
        GatewayUnreachableError after `reconnect_within_s` without a connection.
        """
        while self.end is None:
            try:
                item = await self._next()
            except ConnectionClosed as closed:
                if self._closed:
                    return
                await self._reconnect(closed)
                continue
            if item is None:
                continue
            if isinstance(item, Chunk):
                self._received_s = item.end_s
                yield item
                self._taken_s = item.end_s
                self._after = item.index
            else:
                self._events_after = item.sequence
                yield item

    # Inside

    async def _next(self) -> Chunk | Event | None:
        if self._socket is None:
            raise RuntimeError("use the stream in an `async with` block")
        raw = await self._socket.recv()
        if isinstance(raw, bytes):
            return self._video(raw)
        message = json.loads(raw)
        kind = message.get("type", "")
        if kind in ("init", "chunk"):
            self._announced = message
        elif kind == "error":
            self._problem = message
        elif kind == "end":
            self.end = End.model_validate(message)
        elif "sequence" in message:
            return Event.model_validate(message)
        # Other messages are of a newer gateway.
        return None

    def _video(self, data: bytes) -> Chunk | None:
        message, self._announced = self._announced, None
        if message is None or message.get("bytes") != len(data):
            raise ProtocolError(f"{len(data)} bytes of video were not announced")
        if message["type"] == "init":
            self._format = VideoFormat(
                message["mime"], message["width"], message["height"], message["fps"], data
            )
            return None
        if self._format is None:
            raise ProtocolError("a chunk came before the init segment")
        return Chunk(
            index=message["index"],
            start_s=message["start_s"],
            duration_s=message["duration_s"],
            control_seq=message["control_seq"],
            epoch=message["epoch"],
            worker=message["worker"],
            compute_s=message["compute_s"],
            published_at=message["published_at"],
            format=self._format,
            fragment=data,
        )

    async def _reconnect(self, closed: ConnectionClosed) -> None:
        await self._disconnect()
        self._go_on_after(_code(closed))
        await self._connect()

    def _go_on_after(self, code: int) -> None:
        """Raise the problem behind a close code that a repeat would meet again."""
        status = _FINAL.get(code)
        if status is None:
            return
        problem, self._problem = self._problem, {}
        error = problem_error(status, problem or {"title": f"the gateway closed the stream with {code}"})
        if isinstance(error, ChunkGoneError) and self._skip_lost:
            self._after = error.continues_at - 1
            return
        raise error

    async def _connect(self) -> None:
        """Connect with as many attempts as `reconnect_within_s` allows, and read the greeting."""
        self._problem = {}
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_before_delay(self._reconnect_within_s),
            wait=self._wait_s,
            retry=tenacity.retry_if_exception_type((OSError, TimeoutError, WebSocketException)),
            reraise=True,
        )
        try:
            await retrying(self._connect_once)
        except (OSError, TimeoutError, WebSocketException) as error:
            if self._problem:
                raise problem_error(self._problem.get("status", 503), self._problem) from error
            raise GatewayUnreachableError(f"{self._url}: {error or type(error).__name__}") from error

    def _wait_s(self, state: tenacity.RetryCallState) -> float:
        return max(self._problem.get("retry_after_s") or 0.0, _BACKOFF(state))

    async def _connect_once(self) -> None:
        query = {"after": self._after, "events_after": self._events_after}
        given = urlencode({name: value for name, value in query.items() if value is not None})
        try:
            socket = await connect(
                f"{self._url}?{given}" if given else self._url,
                additional_headers=self._headers,
                max_size=MESSAGE_LIMIT_BYTES,
                open_timeout=10,
            )
        except InvalidStatus as refused:
            if refused.response.status_code >= 500:
                raise
            body = refused.response.body or b""
            raise problem_error(refused.response.status_code, _problem_of(bytes(body))) from None
        try:
            self._greeted(socket, await self._greeting(socket))
        except ConnectionClosed as closed:
            self._go_on_after(_code(closed))
            raise
        except BaseException:
            await socket.close()
            raise

    async def _greeting(self, socket: ClientConnection) -> dict[str, Any]:
        """Return the first message. A gateway that refuses sends an error, and closes."""
        while True:
            message: dict[str, Any] = json.loads(await socket.recv())
            if message.get("type") != "error":
                return message
            self._problem = message

    def _greeted(self, socket: ClientConnection, message: dict[str, Any]) -> None:
        try:
            hello = Hello.model_validate(message)
        except ValidationError as error:
            raise ProtocolError(f"the greeting is not one of this protocol: {error}") from error
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the gateway has version {hello.protocol_version} of the protocol, "
                f"and this client version {PROTOCOL_VERSION}"
            )
        if self.hello is None:
            self._taken_s = self._received_s = hello.start_s
        if self._events_after is None:
            self._events_after = hello.events_after
        self.hello, self._socket = hello, socket
        self._format = self._announced = None
        self.connections += 1
        self._reporter = asyncio.create_task(self._report(socket, hello.report_interval_s))

    async def _report(self, socket: ClientConnection, interval_s: float) -> None:
        with suppress(ConnectionClosed):
            while True:
                position_s = self._taken_s if self.playhead_s is None else self.playhead_s
                buffered_s = max(0.0, self._received_s - position_s)
                report = {"type": "playhead", "playhead_s": position_s, "buffered_s": buffered_s}
                await socket.send(json.dumps(report))
                await asyncio.sleep(interval_s)

    async def _disconnect(self) -> None:
        reporter, socket = self._reporter, self._socket
        self._reporter = self._socket = None
        if reporter is not None:
            reporter.cancel()
            with suppress(asyncio.CancelledError):
                await reporter
        if socket is not None:
            await socket.close()


def _code(closed: ConnectionClosed) -> int:
    return closed.rcvd.code if closed.rcvd is not None else _NO_CLOSE_FRAME


def _problem_of(body: bytes) -> dict[str, Any]:
    try:
        problem = json.loads(body)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}
